"""docs/api.md against the served document and the protos: every field is on the page, as what it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from shoal.common.v1 import sampling_pb2
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_gateway.openapi.document import document
from shoal_gateway.openapi.schema import IGNORED, REFUSED

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]


def section(title: str) -> str:
    _, _, rest = PAGE.partition(f"\n## {title}\n")
    assert rest, title
    return rest.partition("\n## ")[0]


def on_page(text: str) -> dict[str, set[str]]:
    """The names in the first column of a section's tables, by the word in the second."""
    found: dict[str, set[str]] = {"supported": set(), "ignored": set(), "refused": set()}
    for names, word in re.findall(r"^\| (`.*?) \| (supported|ignored|refused) \|", text, re.MULTILINE):
        found[word] |= set(re.findall(r"`(\w+)`", names))
    return found


def in_document(*names: str) -> dict[str, set[str]]:
    """The properties of request schemas, by what they are."""
    found: dict[str, set[str]] = {"supported": set(), "ignored": set(), "refused": set()}
    for name in names:
        for schema in SCHEMAS[name].get("anyOf", [SCHEMAS[name]]):
            for field, said in schema["properties"].items():
                word = {IGNORED: "ignored", REFUSED: "refused"}.get(said.get("description", ""), "supported")
                found[word].add(field)
    return found


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("What all have in common", ("ShoalRequest",)),
        ("Chat Completions", ("ChatRequest",)),
        ("Completions", ("CompletionRequest",)),
        ("Responses", ("ResponsesRequest",)),
        ("Messages", ("MessagesRequest",)),
        ("tokenize and detokenize", ("TokenizeRequest", "DetokenizeRequest")),
    ],
)
def test_a_section_names_exactly_the_fields_of_its_requests(title: str, names: tuple[str, ...]) -> None:
    assert on_page(section(title)) == in_document(*names)


@pytest.mark.parametrize(
    "message",
    [
        generation_pb2.Generation,
        chat_pb2.ChatPrompt,
        chat_pb2.ChatMessage,
        chat_pb2.Tool,
        sampling_pb2.SamplingParams,
        sampling_pb2.Constraint,
    ],
)
def test_the_table_of_grpc_names_exactly_the_fields_of_its_messages(message: Any) -> None:
    descriptor = message.DESCRIPTOR
    (row,) = re.findall(rf"^\| {descriptor.name} \| (.*) \|$", section("gRPC"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {field.name for field in descriptor.fields}


def test_every_path_is_on_the_page() -> None:
    for path in DOCUMENT["paths"]:
        shown = path.removeprefix("/anthropic")
        assert f"`{shown}`" in PAGE or f" {shown}`" in PAGE, path
