"""Two turns of a conversation through a gateway that came without model files: it matches by tokens, and the
second turn finds in the engine's cache what the gateway predicted (P21)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

__all__ = ["second_turn_is_as_predicted"]

_CLERK = "You are the clerk of a small harbour office, and careful with every word. " * 16
_BLOCK = 64


def second_turn_is_as_predicted(
    url: str, model: str, until: Callable[[str, Callable[[], object], float], float]
) -> str:
    """What it found, in a line. `until(what, condition, seconds)` waits."""
    with httpx.Client(base_url=url, timeout=120) as client:

        def ask(messages: list[dict[str, str]]) -> tuple[dict[str, Any], dict[str, Any]]:
            body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
            got = client.post("/v1/chat/completions", json=body, headers={"X-Leadline-Explain": "1"})
            assert got.status_code == 200, got.text
            return got.json(), json.loads(got.headers["x-leadline-explain"])

        hello = [{"role": "user", "content": "Hello."}]
        seconds = until("the gateway matches by tokens", lambda: ask(hello)[1]["exact"], 60)
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards[model]["prefix_matching"] == {"by": "tokens"}

        talk = [{"role": "system", "content": _CLERK}, {"role": "user", "content": "Is the ship in?"}]
        first, why = ask(talk)
        assert why["prompt_tokens"] == first["usage"]["prompt_tokens"]
        whole = first["usage"]["prompt_tokens"] // _BLOCK * _BLOCK
        talk += [first["choices"][0]["message"], {"role": "user", "content": "And the other one?"}]
        second, why = ask(talk)
        predicted = next(row["matched_tokens"] for row in why["pods"] if row["pod"] == why["pod"])
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert why["exact"]
        assert predicted == cached == whole > 0, (predicted, cached, whole)
        return f"by tokens after {seconds:.1f} s; the second turn's {cached} cached tokens were predicted"
