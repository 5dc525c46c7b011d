"""From a parsed request to token ids and prefix chain: what the gateway takes, on prompts of 10,000 tokens.

    python benchmarks/gateway_tokenize.py [--model FOLDER] [--tokens 10000] [--samples 60] [--no-record]

    known        the next turn of a conversation whose last turn this gateway has seen (target: p50 < 2 ms)
    cold chat    a conversation of some fifty messages, never seen          (target: p50 < 15 ms)
    cold text    one message with a document in it, never seen              (target: p50 < 15 ms)
    whole        a conversation by one call of the tokenizer, as without these caches

Texts are slices of this repository's own files, another one for each sample. CPU milliseconds are those of
all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from leadline.gateway.tokens.service import TokenService
from leadline.protocol.chain import chain
from leadline.protocol.openai.chat import AssistantMessage, ChatCompletionRequest, ChatMessage, UserMessage
from leadline.protocol.openai.service import PrefixChain
from record import record

ROOT = Path(__file__).resolve().parent.parent
IDENTITY = PrefixChain(model="smollm2", revision="benchmark", block_size=64)


class Texts:
    """Slices of the repository's files, none twice in a row."""

    def __init__(self, seed: int) -> None:
        folders = ("docs", "engine", "gateway", "protocol", "tests")
        found = sorted(file for folder in folders for file in (ROOT / folder).rglob("*"))
        files = [file for file in found if file.suffix in (".md", ".py")]
        self._text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self._random = random.Random(seed)

    def slice(self, characters: int) -> str:
        start = self._random.randrange(len(self._text) - characters)
        return self._text[start : start + characters]

    def conversation(self, characters: int) -> list[ChatMessage]:
        """Ends with a user's message; about `characters` in all."""
        messages: list[ChatMessage] = []
        while characters > 0 or len(messages) % 2 == 0:
            length = self._random.randint(100, 1200)
            characters -= length
            kind = AssistantMessage if len(messages) % 2 else UserMessage
            messages.append(kind(content=self.slice(length)))
        return messages


def chat(messages: list[ChatMessage]) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=messages)


class Timer:
    """Wall and CPU milliseconds of one row's samples."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    async def sample(self, work: Callable[[], Awaitable[int]]) -> int:
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = await work()
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self.cpu.append(1e3 * (time.process_time() - cpu))
        return tokens


async def measure(service: TokenService, target: int, samples: int) -> list[tuple[str, Timer, float]]:
    texts = Texts(seed=1)
    sample = [texts.slice(5000) for _ in range(100)]
    characters = int(target * 500_000 / sum(map(len, service.tokenizer.encode_batch(sample))))
    rows: dict[str, Timer] = {name: Timer() for name in ("known", "cold chat", "cold text", "whole")}
    tokens: dict[str, list[int]] = {name: [] for name in rows}

    async def through_service(messages: list[ChatMessage]) -> int:
        (prompt,) = await service.prompts(chat(messages), IDENTITY)
        return prompt.num_tokens

    async def whole(messages: list[ChatMessage]) -> int:
        text = service.renderer.render([{"role": "user", "content": m.content} for m in messages])
        ids = service.tokenizer.encode(text, add_special_tokens=False)
        chain(IDENTITY.namespace(), ids)
        return len(ids)

    async def take(name: str, work: Callable[[list[ChatMessage]], Awaitable[int]], talk: list[ChatMessage]):
        tokens[name].append(await rows[name].sample(lambda: work(talk)))

    for _ in range(samples):
        talk = texts.conversation(characters)
        await take("cold chat", through_service, talk)
        talk = [*talk, AssistantMessage(content=texts.slice(600)), UserMessage(content=texts.slice(200))]
        await take("known", through_service, talk)
        await take("cold text", through_service, [UserMessage(content=texts.slice(characters))])
        await take("whole", whole, texts.conversation(characters))
    return [(name, timer, statistics.mean(tokens[name])) for name, timer in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a model folder; the demo model's by default")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.jsonl alone")
    given = parser.parse_args()
    folder = given.model
    if folder is None:
        from leadline.engine.hub import resolve_model

        folder = resolve_model("smollm2").path
    service = TokenService.load(folder)
    print(f"{'':10} {'tokens':>7} {'p50 ms':>8} {'p90 ms':>8} {'CPU p50':>8}")
    for name, timer, tokens in asyncio.run(measure(service, given.tokens, given.samples)):
        wall, cpu = statistics.median(timer.wall), statistics.median(timer.cpu)
        p90 = sorted(timer.wall)[int(0.9 * len(timer.wall))]
        print(f"{name:10} {tokens:7.0f} {wall:8.2f} {p90:8.2f} {cpu:8.2f}")
        if given.no_record:
            continue
        workload = f"gateway tokenize, {given.tokens} tokens, {name}"
        record(f"{workload}, p50", round(wall, 3), "ms")
        record(f"{workload}, CPU p50", round(cpu, 3), "ms")
    service.close()


if __name__ == "__main__":
    main()
