"""The best hit rate that a workload allows: of one cache that all engines share and that forgets nothing.

Found afterwards from the texts that were sent and that came back, with the model's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leadline.cli.routing.conversations import Turn
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["Beginnings", "ceiling_hit_rate"]


class Beginnings:
    """Which beginnings of full blocks were there before.

    A beginning is known by a number, so a block costs its own length and not that of all before it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def known(self, ids: Sequence[int]) -> int:
        """Tokens at the beginning of `ids` in blocks that were added before."""
        found = number = 0
        for key in self._blocks(ids):
            following = self._numbers.get((number, key))
            if following is None:
                break
            number = following
            found += self._block_size
        return found

    def add(self, ids: Sequence[int]) -> None:
        number = 0
        for key in self._blocks(ids):
            number = self._numbers.setdefault((number, key), len(self._numbers) + 1)

    def _blocks(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._block_size
        return [tuple(ids[end - size : end]) for end in range(size, len(ids) + 1, size)]


def ceiling_hit_rate(folder: Path, block_size: int, rounds: Sequence[Sequence[Turn]]) -> float:
    """The share of prompt tokens in blocks that some request before had, its answer included, in the order in
    which they were sent. Caches are empty when a round begins."""
    tokenizer = Tokenizer.load(folder)
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    found = total = 0
    for turns in rounds:
        seen = Beginnings(block_size)
        prompts = [renderer.render(turn.messages) for turn in turns]
        answered = [
            renderer.render(
                [*turn.messages, {"role": "assistant", "content": turn.answer}], add_generation_prompt=False
            )
            for turn in turns
        ]
        encoded = zip(turns, tokenizer.encode_batch(prompts), tokenizer.encode_batch(answered), strict=True)
        for turn, ids, after in encoded:
            total += len(ids)
            # A fully cached prompt still computes its last block.
            found += seen.known(ids[:-1])
            seen.add(ids)
            # The KV of the last token of an answer is never computed.
            seen.add(after[: len(ids) + turn.output_tokens - 1])
    return found / total
