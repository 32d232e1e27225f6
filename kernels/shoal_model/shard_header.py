"""The header of one safetensors file: little-endian uint64 length, JSON, then the data, back to back.

Source: the format description of the safetensors project. Read by hand because the library neither tells offsets nor
says which tensor is at fault.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shoal_model.errors import CheckpointError
from shoal_model.inventory import StorageType
from shoal_model.json_fields import Fields, parse_object

_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger number means that this is no safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a shard; `offset` counts bytes from the start of the file."""

    shape: tuple[int, ...]
    storage: StorageType
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.storage.bytes


def read_shard_header(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a shard by name, as written. Reads the header only.

    Raises CheckpointError if the file is missing or cut short, the header is malformed, or the tensors do not fill
    the data exactly, without overlap or gap.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(path, "is not a safetensors file: no valid header length")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    if len(text) < length:
        raise CheckpointError(path, f"is truncated: its header needs {length} bytes, {len(text)} are there")
    try:
        header = parse_object(text.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not a safetensors file: {error}") from error
    start = _LENGTH_BYTES + length
    fields = Fields(header, path)
    tensors = {name: _entry(fields, name, start) for name in header if name != "__metadata__"}
    _check_layout(path, tensors, start, file_bytes)
    return tensors


def _entry(header: Fields, name: str, start: int) -> StoredTensor:
    entry = header.section(name)
    types = {storage.value: storage for storage in StorageType}
    type_name = entry.string("dtype")
    if type_name not in types:
        raise header.fail(name, f"has storage type {type_name}, known are {', '.join(types)}")
    offsets = entry.integers("data_offsets")
    if len(offsets) != 2:
        raise entry.fail("data_offsets", f"must be two numbers, got {list(offsets)}")
    tensor = StoredTensor(shape=entry.integers("shape"), storage=types[type_name], offset=start + offsets[0])
    if offsets[1] - offsets[0] != tensor.bytes:
        raise header.fail(
            name,
            f"has data_offsets {list(offsets)}, but {type_name} {list(tensor.shape)} takes {tensor.bytes} bytes",
        )
    return tensor


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], start: int, file_bytes: int) -> None:
    end, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(path, f"{name} {what} {previous}: it starts at byte {tensor.offset}, not {end}")
        end, previous = tensor.offset + tensor.bytes, name
    if file_bytes < end:
        raise CheckpointError(path, f"is truncated: {previous} ends at byte {end}, the file at {file_bytes}")
    if file_bytes > end:
        raise CheckpointError(path, f"has {file_bytes - end} bytes after its last tensor, {previous}")
