"""docs/messages.md names every field of a Messages request: served, refused or accepted without effect."""

from __future__ import annotations

import re
from pathlib import Path

from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta

from leadline.protocol.anthropic.request import MessagesRequest
from leadline.protocol.openai.other_servers import SKIPPED

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
REQUESTS = PAGE.split("\n## Requests\n")[1].split("\n## ")[0]
OURS = {*MessagesRequest.__struct_fields__}
ANTHROPICS = {
    *messages.MessageCreateParamsBase.__annotations__,
    *beta.MessageCreateParamsBase.__annotations__,
    *("stream", "temperature", "top_p", "top_k", "output_format"),
}
"""With those of older versions of the client."""
NO_BODY = {"betas", "user_profile_id", "workspace_id"}
"""Headers, and what is sent in them."""


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_every_field_is_served_refused_or_without_effect_as_the_page_says() -> None:
    table, rest = REQUESTS.split("\nOur extensions work")
    extensions, rest = rest.split("\nRefused with 400")
    refused, without_effect = rest.split("Accepted without effect")
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in in_backticks(row)}
    assert in_backticks(refused) == {*MessagesRequest.not_supported}
    assert in_backticks(without_effect) - {"citations"} == ANTHROPICS - OURS - {"betas"} | {"service_tier"}
    assert named == ANTHROPICS & OURS - {*MessagesRequest.not_supported, "service_tier"}
    assert in_backticks(extensions) == OURS - ANTHROPICS - {*MessagesRequest.not_supported, *SKIPPED}
