"""docs/api.md names every field of a request once: served, refused or ignored."""

from __future__ import annotations

import re
from pathlib import Path

from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from leadline.engine.server.routes.openapi import document
from leadline.gateway.request.dialects import DIALECTS
from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest
from leadline.protocol.openai.other_servers import SKIPPED
from leadline.protocol.responses import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
FIELDS = PAGE.split("\n## Fields\n")[1].split("\n## ")[0]
OURS = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
OPENAIS = {
    *chat.CompletionCreateParamsBase.__annotations__,
    *completions.CompletionCreateParamsBase.__annotations__,
    "stream",
}


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def first_column(table: str) -> set[str]:
    return {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in in_backticks(row)}


def test_every_field_is_served_refused_or_ignored_as_the_page_says() -> None:
    of_openai, rest = FIELDS.split("Beyond OpenAI's;")
    beyond, rest = rest.split("\nRefused with 400")
    refused, rest = rest.split("\nSkipped, ")
    skipped, ignored = rest.split("\nIgnored, ")
    refused_fields = {*ChatCompletionRequest.not_supported}
    assert in_backticks(refused) == refused_fields
    refused_fields -= {*CompletionRequest.__struct_fields__} - {*CompletionRequest.not_supported}
    assert in_backticks(skipped) == {*SKIPPED}
    assert in_backticks(ignored) == OPENAIS - OURS
    assert first_column(of_openai) == OPENAIS & OURS - refused_fields
    assert first_column(beyond) == OURS - OPENAIS - refused_fields - {*SKIPPED}


def test_every_field_of_responses_is_served_refused_or_ignored_as_its_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
    fields = page.split("\n## Fields of a request\n")[1].split("\n## ")[0]
    of_openai, rest = fields.split("Beyond OpenAI's, ")
    beyond, rest = rest.split("\nRefused with 400: ")
    refused, ignored = rest.split("\nIgnored, ")
    ours = {*ResponsesRequest.__struct_fields__}
    openais = {*responses.ResponseCreateParamsBase.__annotations__, "stream"}
    refused_fields = {"background", "conversation", "prompt", *ResponsesRequest.not_supported}
    assert in_backticks(refused) - {"input"} == refused_fields
    assert in_backticks(ignored) == openais - ours
    assert first_column(of_openai) - {"enable_response_messages"} == openais & ours - refused_fields
    assert in_backticks(beyond) == ours - openais - refused_fields - {*SKIPPED, "enable_response_messages"}


def test_every_path_of_an_engine_is_in_the_table() -> None:
    table = PAGE.split("\n## Paths\n")[1].split("\n## ")[0]
    for path in {*document()["paths"], *DIALECTS}:
        shown = "/admin/…" if path.startswith("/admin/") else path.replace("{name}", "NAME")
        assert shown in table
