"""The door: whoever comes by HTTP or gRPC passes it, and what was used is on record when it is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from shoal_common.errors import QuotaExceeded

from shoal_gateway.edge.account import Account
from shoal_gateway.edge.caller import Caller, Tell
from shoal_gateway.edge.errors import InvalidApiKey
from shoal_gateway.edge.keys import ApiKey, KeyRing
from shoal_gateway.edge.limits import UNLIMITED, Share
from shoal_gateway.edge.usage import UsageBook

_MISSING = "an API key is required: `Authorization: Bearer KEY` or `x-api-key: KEY`"
_WRONG = "the API key is not valid"


class Visit:
    """A block that a caller is inside of; `leave` is told what ended it, None where nothing did."""

    def __init__(self, caller: Caller, leave: Callable[[BaseException | None], None]) -> None:
        self._caller, self._leave = caller, leave

    def __enter__(self) -> Caller:
        return self._caller

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)


class Edge:
    """Keys, limits and records of one gateway. Belongs to the event loop.

    is_open       keys are off: everyone is let in, as nobody in particular
    share         this gateway's part of every limit, asked at each request
    reservation   output tokens of a choice that are booked before they are used, at most
    clock         any seconds that only grow;  calendar  seconds since 1970, for keys that expire
    blind         random bytes, see KeyRing
    """

    def __init__(
        self,
        *,
        is_open: bool,
        share: Callable[[], Share],
        reservation: int,
        usage: UsageBook,
        clock: Callable[[], float],
        calendar: Callable[[], float],
        blind: bytes,
    ) -> None:
        self._is_open, self._share, self._reservation, self._usage = is_open, share, reservation, usage
        self._clock, self._calendar, self._blind = clock, calendar, blind
        self._fixed: tuple[ApiKey, ...] = ()
        self._ring = KeyRing((), blind=blind)
        self._accounts: dict[str, Account] = {}

    def use_fixed(self, keys: Sequence[ApiKey]) -> None:
        """Keys that stay for the life of the process, beside those of the file. Raises BadKeys."""
        self._fixed = tuple(keys)
        self.use(())

    def use(self, keys: Sequence[ApiKey]) -> None:
        """The keys of the file, from now on. Requests under way go on. Raises BadKeys; then nothing has changed."""
        self._ring = KeyRing((*self._fixed, *keys), blind=self._blind)
        self._usage.keys_in_force(len(self._ring))
        gone = [key_id for key_id, one in self._accounts.items() if key_id not in self._ring and not one.in_flight]
        for key_id in gone:
            del self._accounts[key_id]

    @property
    def asks_for_keys(self) -> bool:
        """Whoever comes has to show one."""
        return not self._is_open

    def authenticate(self, secret: bytes) -> ApiKey | None:
        """Whose secret it is; None where keys are off. Raises InvalidApiKey."""
        if self._is_open:
            return None
        key = self._ring.find(secret, self._calendar())
        if key is None:
            self._usage.stranger()
            raise InvalidApiKey(_WRONG if secret else _MISSING)
        return key

    def enter(self, key: ApiKey | None, *, api: str, tell: Tell | None = None) -> Visit:
        """A request that generates, from its head to the end of its answer: it runs inside of the block.

        key    what `authenticate` returned
        api    names the interface, for the record
        tell   called with how the key's limits stand whenever that changed; never for a key without limits
        Raises ConcurrencyExceeded or RequestsPerMinute.
        """
        account = self._account(key)
        try:
            charge = account.enter(self._clock())
        except QuotaExceeded as error:
            self._refused("" if key is None else key.key_id, error)
            if tell is not None and account.is_limited:
                tell(account.standings(self._clock()))
            raise
        caller = Caller(key, account, charge, reservation=self._reservation, clock=self._clock, tell=tell)
        return Visit(caller, lambda error: self._left(caller, api, error))

    def _left(self, caller: Caller, api: str, error: BaseException | None) -> None:
        if isinstance(error, QuotaExceeded):
            self._refused(caller.key_id, error)
        departure = caller.leave(error)
        if departure is not None:
            self._usage.record(caller.key_id, api, departure)

    def _account(self, key: ApiKey | None) -> Account:
        key_id, limits = ("", UNLIMITED) if key is None else (key.key_id, key.limits)
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = Account(limits, self._share(), self._clock())
        else:
            account.update(limits, self._share(), self._clock())
        return account

    def _refused(self, key_id: str, error: QuotaExceeded) -> None:
        self._usage.refused(key_id, error.reason.lower())
