"""Refusing what the model would never see: images and files, wherever a conversation of any API may hold one. Pure.

What the recipe tells the model of, a document that it cannot show, is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_common.errors import InvalidArgument

_IMAGES = frozenset({"image_url", "image", "input_image", "computer_screenshot", "image_generation_call"})
"""Of Chat, of Messages and of Responses: what a client meant is clear where it mixes them up, too."""
_FILES = frozenset({"file", "input_file"})
_FIELDS = ("messages", "input", "system")
_NESTED = ("content", "output", "outputs", "source", "summary")
_DEPTH = 8
"""A message, a tool's result in it, a document in that, its source, its parts: no API knows anything deeper."""


def refuse_unseen(body: Mapping[str, Any]) -> None:
    """Raises InvalidArgument, which names the first image or file, whatever else is wrong with it.

    The reason is IMAGES_UNSUPPORTED or FILES_UNSUPPORTED.
    """
    for field in _FIELDS:
        value = body.get(field)
        if isinstance(value, list):
            _refuse_in(field, value, _DEPTH, has_files=True)


def images_unsupported(path: str) -> InvalidArgument:
    """The refusal of an image at `path`."""
    return InvalidArgument.at(path, "images are not supported yet", reason="IMAGES_UNSUPPORTED")


def _refuse_in(path: str, values: list[Any], depth: int, *, has_files: bool) -> None:
    for index, one in enumerate(values):
        if isinstance(one, dict):
            _refuse(path, index, one, depth, has_files=has_files)


def _refuse(path: str, index: int | None, one: dict[str, Any], depth: int, *, has_files: bool) -> None:
    """Of what stands at `path`, or in the list there."""
    kind = one.get("type")
    is_known = isinstance(kind, str)
    if (is_known and kind in _IMAGES) or _holds_image(one):
        raise images_unsupported(_at(path, index))
    if has_files and is_known and kind in _FILES:
        raise InvalidArgument.at(_at(path, index), "files are not supported", reason="FILES_UNSUPPORTED")
    if not depth:
        return
    for key in _NESTED:
        nested = one.get(key)
        if isinstance(nested, list):
            # In the place of a file that a tool gave the model is told that there was one.
            _refuse_in(f"{_at(path, index)}.{key}", nested, depth - 1, has_files=has_files and key == "content")
        elif isinstance(nested, dict):
            _refuse(f"{_at(path, index)}.{key}", None, nested, depth - 1, has_files=False)


def _at(path: str, index: int | None) -> str:
    return path if index is None else f"{path}[{index}]"


def _holds_image(one: dict[str, Any]) -> bool:
    """A file or a document may be an image too."""
    media_type, data, file = one.get("media_type"), one.get("file_data"), one.get("file")
    if isinstance(file, dict):
        data = file.get("file_data")
    return (isinstance(media_type, str) and media_type.startswith("image/")) or (
        isinstance(data, str) and data.startswith("data:image/")
    )
