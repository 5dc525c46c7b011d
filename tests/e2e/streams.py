"""Streamed chats, one after the other, while something else is done to the cluster."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

__all__ = ["Load", "Stream"]


@dataclass(slots=True)
class Stream:
    began: float
    ended: float
    pieces: int
    finish: str | None
    error: str = ""


class Load:
    """Streams, one after the other in each of a few threads, each over a connection of its own.

    As many tokens each as take `seconds` alone: longer than a rollout takes where the machine is fast, and
    not without end where it is slow."""

    def __init__(self, url: str, model: str, threads: int = 3, seconds: float = 12.0) -> None:
        self._url, self._model, self._tokens = url, model, 8
        first = self._one(0)
        assert not first.error, first.error
        self._tokens = min(max(round(8 * seconds / (first.ended - first.began)), 16), 500)
        print(f"streams of {self._tokens} tokens")
        self._stop = threading.Event()
        self.streams: list[Stream] = []
        self._pool = ThreadPoolExecutor(threads)
        self._running = [self._pool.submit(self._run, number) for number in range(threads)]

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.streams.append(self._one(number))

    def _one(self, number: int) -> Stream:
        done = Stream(time.monotonic(), 0.0, 0, None)
        try:
            with openai.OpenAI(
                base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client:
                for chunk in client.chat.completions.create(
                    model=self._model,
                    messages=[{"role": "user", "content": f"Tell me of the sea, part {number}."}],
                    max_tokens=self._tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    if chunk.choices:
                        done.pieces += 1
                        done.finish = chunk.choices[0].finish_reason or done.finish
        except openai.OpenAIError as error:
            done.error = repr(error)
        done.ended = time.monotonic()
        return done

    def stop(self) -> list[Stream]:
        self._stop.set()
        for future in self._running:
            future.result(180)
        return self.streams
