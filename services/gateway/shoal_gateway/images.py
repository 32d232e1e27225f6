"""Refusing images, wherever a conversation of any API may hold one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_common.errors import InvalidArgument

_TYPES = frozenset({"image_url", "image", "input_image"})
"""Of Chat, of Messages and of Responses: what a client meant is clear where it mixes them up, too."""
_FIELDS = ("messages", "input", "system")
_NESTED = ("content", "output")
_DEPTH = 4
"""A message, a tool's result in it, a part of that: no API knows anything deeper."""


def refuse_images(body: Mapping[str, Any]) -> None:
    """Raises InvalidArgument, IMAGES_UNSUPPORTED, which names the first image, whatever else is wrong with it."""
    for field in _FIELDS:
        _refuse(field, body.get(field), _DEPTH)


def unsupported(path: str) -> InvalidArgument:
    """The refusal of an image at `path`."""
    return InvalidArgument.at(path, "images are not supported yet", reason="IMAGES_UNSUPPORTED")


def _refuse(path: str, value: Any, depth: int) -> None:
    if not isinstance(value, list) or not depth:
        return
    for index, one in enumerate(value):
        if isinstance(one, dict):
            kind = one.get("type")
            if isinstance(kind, str) and kind in _TYPES:
                raise unsupported(f"{path}[{index}]")
            for nested in _NESTED:
                _refuse(f"{path}[{index}].{nested}", one.get(nested), depth - 1)
