"""Thirty prompts as token ids: short and long, at, just below and just above block boundaries, some sharing a
prefix. None meets a near-tie of the two best logits on its way (test_exact.py checks the gaps)."""

from __future__ import annotations

from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["NEW_TOKENS", "make_prompts"]

NEW_TOKENS = 24

SHORT = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is the boiling point of water?\nA:",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "<|im_start|>user\nName two planets.<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\n",
    "To make bread you need flour, water,",
    "Roses are red,\nviolets are blue,\n",
    "The",
    "Photosynthesis is the process by which",
]

LONG = """The lighthouse stood at the end of a narrow spit of land, and for more than a hundred years its
keeper had written down everything that happened there. On the first page he noted the weather,
the height of the tide and the names of the ships that passed. Later keepers added what they saw
fit: the arrival of a whale, the price of oil, the day the bridge was finished, the winter in
which the sea froze as far as the eye could reach. When the light was made automatic, the last
keeper carried all forty volumes to the town library, where they were put on a shelf behind the
map cabinet and forgotten. It was a schoolteacher who found them again. She had been looking for
an old chart of the harbour, and when she opened the first volume she did not stop reading until
the library closed. The next day she came back with a notebook, and the day after that with
three of her pupils. Together they counted storms, drew curves of temperature and made a list of
every vessel that had ever been reported missing. What they found surprised even the harbour
master, who thought he knew every story that was told along the coast. Years later the pupils
still met once a month, and the shelf behind the map cabinet was never forgotten again."""

OTHER = """Question: A farmer has seventeen sheep, and all but nine run away. How many sheep does the
farmer have left? Explain your reasoning step by step, then give the answer as a single number
on the last line. Keep in mind that the words matter more than the arithmetic here, and that
many people answer too quickly."""


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """30 prompts of 1 to 257 tokens."""
    long, other = tokenizer.encode(LONG), tokenizer.encode(OTHER)
    prompts = [tokenizer.encode(text) for text in SHORT]
    prompts += [long[:length] for length in (15, 16, 17, 63, 64, 65, 128, 129, 192, 257)]
    prompts += [other[:length] for length in (31, 48, len(other))]
    # The first two blocks of `long`, then something else: a prefix hit that ends inside a prompt.
    prompts += [long[:64] + other[:20], long[:70] + other[:9], long[:32] + other[:32]]
    return prompts
