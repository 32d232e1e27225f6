"""A damaged checkpoint gives one error that names the tensor or the shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_model.checkpoint import INDEX_NAME, Checkpoint
from shoal_model.errors import CheckpointError
from shoal_model.inventory import build_inventory
from shoal_model.shard_header import read_shard_header
from support.checkpoints import (
    FIRST_SHARD,
    SECOND_SHARD,
    TINY,
    Json,
    copy_tiny,
    edit_header,
    edit_index,
    edit_json,
    read_shard,
    write_shard,
)

SINK = "layers.0.attn.attn_sink"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return copy_tiny(tmp_path)


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_golden_checkpoint_opens_with_every_tensor_in_inventory_order() -> None:
    checkpoint = Checkpoint.open(TINY)
    assert list(checkpoint.tensors) == list(build_inventory(checkpoint.config))


def test_names_with_a_model_prefix_mean_the_same(directory: Path) -> None:
    def rename(header: Json) -> None:
        for name in [name for name in header if name != "__metadata__"]:
            header[f"model.{name}"] = header.pop(name)

    for shard in (FIRST_SHARD, SECOND_SHARD):
        edit_header(directory / shard, rename)
    edit_index(directory, rename)
    assert list(Checkpoint.open(directory).tensors) == list(Checkpoint.open(TINY).tensors)


def test_one_tensor_in_both_spellings_is_refused(directory: Path) -> None:
    edit_index(directory, lambda names: names.update({f"model.{SINK}": FIRST_SHARD}))
    assert refusal(directory).detail == f"{SINK} is listed twice, with and without the model. prefix"


def test_a_missing_shard_is_named(directory: Path) -> None:
    (directory / FIRST_SHARD).unlink()
    error = refusal(directory)
    assert error.path == str(directory / FIRST_SHARD)
    assert error.detail.startswith("is missing")


def test_a_tensor_missing_in_the_index_is_named(directory: Path) -> None:
    edit_index(directory, lambda names: names.pop(SINK))
    assert refusal(directory).detail == f"{SINK} is missing"


def test_several_missing_tensors_are_counted(directory: Path) -> None:
    def drop(names: dict[str, str]) -> None:
        del names["norm.weight"], names[SINK]

    edit_index(directory, drop)
    assert refusal(directory).detail == f"{SINK} (and 1 more) is missing"


def test_an_unknown_tensor_is_named(directory: Path) -> None:
    edit_index(directory, lambda names: names.update({"layers.0.attn.q_bias": FIRST_SHARD}))
    assert refusal(directory).detail == "layers.0.attn.q_bias is unknown to this configuration"


def test_a_tensor_that_its_shard_lacks_is_named(directory: Path) -> None:
    edit_index(directory, lambda names: names.update({SINK: SECOND_SHARD}))
    error = refusal(directory)
    assert error.detail == f"holds {SINK}, which the index places in {SECOND_SHARD}"
    edit_header(directory / FIRST_SHARD, lambda header: header.update({"spare": header.pop(SINK)}))
    edit_index(directory, lambda names: names.update({SINK: FIRST_SHARD}))
    assert refusal(directory).detail == "holds spare, which is not in the index"


def test_an_index_name_without_data_is_named(directory: Path) -> None:
    def drop_last(header: Json) -> None:
        last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
        dropped.append(last)
        start = header.pop(last)["data_offsets"][0]
        dropped_start.append(start)

    dropped: list[str] = []
    dropped_start: list[int] = []
    edit_header(directory / FIRST_SHARD, drop_last)
    header, data = read_shard(directory / FIRST_SHARD)
    write_shard(directory / FIRST_SHARD, header, data[: dropped_start[0]])
    assert refusal(directory).detail == f"lacks {dropped[0]}, which the index places in it"


def test_a_tensor_in_two_shards_is_named(directory: Path) -> None:
    header, data = read_shard(directory / SECOND_SHARD)
    header[SINK] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
    write_shard(directory / SECOND_SHARD, header, data + bytes(16))
    error = refusal(directory)
    assert error.path == str(directory / SECOND_SHARD)
    assert error.detail == f"holds {SINK}, which the index places in {FIRST_SHARD}"


def test_a_misshapen_tensor_is_named(directory: Path) -> None:
    edit_header(directory / FIRST_SHARD, lambda header: header[SINK].update(shape=[2, 2]))
    assert refusal(directory).detail == f"{SINK} has shape [2, 2], must be [4]"


def test_a_tensor_of_another_type_is_named(directory: Path) -> None:
    edit_header(directory / FIRST_SHARD, lambda header: header[SINK].update(dtype="BF16", shape=[8]))
    assert refusal(directory).detail == f"{SINK} has storage type BF16, must be F32"


def test_a_misshapen_image_tensor_is_named_though_it_is_not_read(directory: Path) -> None:
    edit_header(directory / SECOND_SHARD, lambda header: header["image_end"].update(shape=[1, 128]))
    assert refusal(directory).detail == "image_end has shape [1, 128], must be [128]"


@pytest.mark.parametrize(
    ("edit", "detail"),
    [
        (lambda entry: entry.update(dtype="F16"), "has storage type F16"),
        (lambda entry: entry.update(dtype=7), "dtype must be a string"),
        (lambda entry: entry.update(shape=[-4]), r"shape\[0\] must be at least 0"),
        (lambda entry: entry.update(shape=[5]), "takes 20 bytes"),
        (lambda entry: entry.update(data_offsets=[0]), "data_offsets must be two numbers"),
        (lambda entry: entry.update(data_offsets=[16, 0]), "takes 16 bytes"),
        (lambda entry: entry.pop("data_offsets"), "data_offsets is missing"),
    ],
)
def test_a_malformed_header_entry_is_named(directory: Path, edit: Callable[[Json], object], detail: str) -> None:
    edit_header(directory / FIRST_SHARD, lambda header: edit(header[SINK]))
    with pytest.raises(CheckpointError, match=rf"{SINK}.*{detail}"):
        Checkpoint.open(directory)


def test_overlapping_offsets_are_named(directory: Path) -> None:
    def shift(header: Json) -> None:
        begin, end = header[SINK]["data_offsets"]
        header[SINK]["data_offsets"] = [begin + 4, end + 4]

    edit_header(directory / FIRST_SHARD, shift)
    assert SINK in refusal(directory).detail


def test_a_truncated_shard_is_named(directory: Path) -> None:
    path = directory / SECOND_SHARD
    path.write_bytes(path.read_bytes()[:-1])
    assert "is truncated" in refusal(directory).detail


def test_trailing_bytes_are_refused(directory: Path) -> None:
    path = directory / SECOND_SHARD
    path.write_bytes(path.read_bytes() + b"\0")
    assert refusal(directory).detail.startswith("has 1 bytes after its last tensor")


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0{}"])
def test_a_file_of_another_format_is_refused(directory: Path, content: bytes) -> None:
    (directory / FIRST_SHARD).write_bytes(content)
    assert refusal(directory).path == str(directory / FIRST_SHARD)


def test_a_shard_outside_the_folder_is_refused(directory: Path) -> None:
    edit_index(directory, lambda names: names.update({SINK: f"../{FIRST_SHARD}"}))
    assert "which is not a file name" in refusal(directory).detail


def test_a_total_size_that_disagrees_is_refused(directory: Path) -> None:
    edit_json(directory / INDEX_NAME, lambda index: index["metadata"].update(total_size=1))
    assert refusal(directory).detail == "metadata.total_size must be 4774802 for this configuration, got 1"


def test_an_index_without_metadata_is_fine(directory: Path) -> None:
    edit_json(directory / INDEX_NAME, lambda index: index.pop("metadata"))
    assert Checkpoint.open(directory)


HEADER_BYTES = (TINY / FIRST_SHARD).read_bytes()[:48328]


@given(place=st.integers(0, len(HEADER_BYTES) - 1), value=st.integers(0, 255))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_damaged_header_byte_is_refused_with_the_typed_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / FIRST_SHARD
    damaged = bytearray(HEADER_BYTES)
    damaged[place] = value
    path.write_bytes(damaged)
    with path.open("ab") as file:
        file.truncate((TINY / FIRST_SHARD).stat().st_size)
    with suppress(CheckpointError):
        assert len(read_shard_header(path)) > 400


@given(
    name=st.sampled_from(sorted(json.loads((TINY / INDEX_NAME).read_text())["weight_map"])),
    shard=st.sampled_from([FIRST_SHARD, SECOND_SHARD, "model-00003-of-00002.safetensors", "", "..", "a/b", None]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_tensor_placed_elsewhere_is_named(
    tmp_path_factory: pytest.TempPathFactory, name: str, shard: str | None
) -> None:
    directory = tmp_path_factory.mktemp("misplaced")
    for file in TINY.iterdir():
        (directory / file.name).symlink_to(file)
    values = json.loads((TINY / INDEX_NAME).read_text())
    is_right = values["weight_map"][name] == shard
    values["weight_map"][name] = shard
    (directory / INDEX_NAME).unlink()
    (directory / INDEX_NAME).write_text(json.dumps(values))
    if is_right:
        assert Checkpoint.open(directory)
    else:
        assert name in str(refusal(directory))
