"""Arenas of other processes on this host."""

from __future__ import annotations

from shoal.common.v1 import kv_transport_pb2 as pb

from shoal_common.errors import FailedPrecondition
from shoal_common.kv_transport.arena import ArenaView

_MAX_MAPPED_ARENAS = 64


class MappedArenas:
    """Arenas of other processes, mapped once. Bounded: the one mapped first goes."""

    def __init__(self, *, is_writable: bool = False) -> None:
        self._is_writable = is_writable
        self._views: dict[str, ArenaView] = {}

    def get(self, grant: pb.TransportGrant) -> ArenaView | None:
        """The arena of a grant; None when it is not shared after all."""
        view = self._views.get(grant.arena_name)
        if view is None:
            try:
                view = ArenaView(grant.arena_name, grant.arena_nonce, is_writable=self._is_writable)
            except FailedPrecondition:
                return None
            while len(self._views) >= _MAX_MAPPED_ARENAS:
                self._views.pop(next(iter(self._views))).close()
            self._views[grant.arena_name] = view
        return view

    def close(self) -> None:
        """Unmap all. Safe to repeat."""
        for view in self._views.values():
            view.close()
        self._views.clear()
