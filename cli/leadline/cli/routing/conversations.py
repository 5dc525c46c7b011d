"""A seeded workload of chats, and clients that hold them: many conversations over a few system prompts.

Each client takes the next conversation and holds all of its turns, one after the other; a turn sends all
messages before it, the model's answers included. So a turn shares its beginning with the turn before it (the
whole history), and a first turn with other conversations of the same system prompt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from leadline.cli.http import ServerError
from leadline.cli.sse import post_events

__all__ = ["WORDS", "Conversation", "Turn", "Workload", "hold"]

Message = dict[str, str]

WORDS = (
    *("river", "stone", "window", "copper", "garden", "signal", "mountain", "paper", "engine", "silver"),
    *("harbor", "letter", "winter", "bridge", "candle", "forest", "market", "number", "ocean", "pocket"),
    *("quiet", "record", "summer", "table", "under", "valley", "weather", "yellow", "anchor", "basket"),
)
"""Messages are made of these words. Each is one token for most models, with the space before it."""


@dataclass(slots=True, frozen=True)
class Conversation:
    system: str
    questions: tuple[str, ...]
    pauses: tuple[float, ...]
    """Seconds before each."""


@dataclass(slots=True, frozen=True)
class Workload:
    """What is asked. The same seed asks the same."""

    systems: int = 6
    system_words: int = 400
    conversations: int = 16
    turns: int = 4
    user_words: int = 40
    output_tokens: int = 16
    clients: int = 4
    think_seconds: float = 0.0
    """Mean pause before each turn. Without pauses clients who began together stay in step, and all ask at
    once."""
    seed: int = 0

    def make(self) -> list[Conversation]:
        rng, pauses = random.Random(self.seed), random.Random(f"pauses {self.seed}")

        def text(words: int) -> str:
            return " ".join(rng.choices(WORDS, k=words))

        systems = [text(self.system_words) for _ in range(self.systems)]
        return [
            Conversation(
                rng.choice(systems),
                tuple(text(self.user_words) for _ in range(self.turns)),
                tuple(pauses.uniform(0.0, 2 * self.think_seconds) for _ in range(self.turns)),
            )
            for _ in range(self.conversations)
        ]


@dataclass(slots=True)
class Turn:
    """One request: what was sent and what its client saw. Seconds."""

    number: int
    """0 is a conversation's first."""
    messages: Sequence[Message] = field(repr=False)
    began: float = 0.0
    ttft: float = 0.0
    """To the first text."""
    total: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    pod: str = ""
    answer: str = field(default="", repr=False)
    error: str | None = None


async def hold(url: str, model: str, workload: Workload) -> tuple[list[Turn], float]:
    """Hold all conversations with the server at `url`: (turns in the order they began, seconds)."""
    waiting = list(reversed(workload.make()))
    turns: list[Turn] = []

    async def client() -> None:
        while waiting:
            conversation = waiting.pop()
            messages: list[Message] = [{"role": "system", "content": conversation.system}]
            for number, question in enumerate(conversation.questions):
                if conversation.pauses[number]:
                    await asyncio.sleep(conversation.pauses[number])
                messages.append({"role": "user", "content": question})
                turn = Turn(number, list(messages))
                turns.append(turn)
                await _ask(url, model, turn, workload.output_tokens)
                messages.append({"role": "assistant", "content": turn.answer})

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(workload.clients)))
    return turns, time.perf_counter() - began


async def _ask(url: str, model: str, turn: Turn, output_tokens: int) -> None:
    body = {
        "model": model,
        "messages": turn.messages,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts = []
    turn.began = time.perf_counter()

    def head(headers: dict[str, str]) -> None:
        turn.pod = headers.get("x-leadline-pod", "")

    try:
        async for event in post_events(url, "/v1/chat/completions", body, on_head=head):
            if usage := event.get("usage"):
                turn.prompt_tokens = usage["prompt_tokens"]
                turn.output_tokens = usage["completion_tokens"]
                turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    turn.ttft = turn.ttft or time.perf_counter() - turn.began
                    parts.append(text)
    except (OSError, EOFError, ServerError, ValueError) as error:
        turn.error = str(error) or type(error).__name__
    turn.total = time.perf_counter() - turn.began
    turn.answer = "".join(parts)
