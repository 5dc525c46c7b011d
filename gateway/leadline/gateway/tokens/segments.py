"""Where a text may be cut so that tokenizing the parts and joining the ids equals tokenizing the whole.

Owns the argument why a cut is safe; there are two kinds.

**In front of a special token.** The `tokenizers` library first searches the text for added tokens that are
matched before normalization (leftmost first, the longest of those that start there, without overlap), and
everything else (normalizer, pre-tokenizer, model) works on the stretches between them one by one:

    <|im_start|>user⏎Hi there<|im_end|>⏎<|im_start|>assistant⏎
    └────── segment ────────┘└─segment─┘└───── segment ──────┘

A cut in front of such a token T is safe if the search finds T there in the whole text too, which the same
search decides, and if nothing reaches over the cut: T does not strip white space on its left (`lstrip`), and
T begins with neither a letter, a digit, "_" nor white space, so that a token in front of it that insists on
standing alone (`single_word`) sees a word's end there either way. The segment begins with T: rules for the
very start of a text (SentencePiece's dummy space) apply to the first segment alone, as they do in the whole.

**Between words** of long stretches, at "a b" with ASCII letters on both sides, when the pre-tokenizer is one
of the byte-level ones whose regex is known to us. They all end a match at a letter before a space, begin one
at a space before a letter, and look behind at nothing.

Either way cuts depend on nothing that comes later in the text (but the two characters behind the cut), so the
beginning of a longer text is cut like the shorter one was: the parts can be remembered.
"""

import json
import re
import unicodedata
from itertools import pairwise

from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["Segmenter", "special_affixes"]

_WORDS = re.compile(r"[A-Za-z] (?=[A-Za-z])")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splitting patterns of published tokenizers: Llama 3 (cl100k), Qwen 2 and 3, GPT-2 and its descendants.
_KNOWN_PATTERNS = frozenset(
    {
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    }
)

_PROBES = (
    "Hello, world! It's  a   test.\n\n  Two lines é 東京 123 456",
    " leading and trailing ",
    "x_y",
)


class Segmenter:
    """Cuts texts for one tokenizer. `chunk`: characters, at least, between two cuts of the second kind.

    Attributes:
        specials: whether texts are cut in front of special tokens.
        words: whether long stretches are cut between words.
    """

    def __init__(self, tokenizer: Tokenizer, *, chunk: int = 4096) -> None:
        self._chunk = chunk
        added = list(tokenizer.backend.get_added_tokens_decoder().values())
        first_pass = [token for token in added if not token.normalized and token.content]
        self._safe = frozenset(
            token.content
            for token in first_pass
            if not token.lstrip and not token.single_word and not re.match(r"[\w\s]", token.content)
        )
        self._all_safe = len(self._safe) == len(first_pass)
        longest_first = sorted((token.content for token in first_pass), key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, longest_first))) if self._safe else None
        self.words = _splits_words(tokenizer) and not any(_reaches_words(token.content) for token in added)
        self.specials = self._search is not None
        # The argument above is about the library as we know it: see whether this one agrees.
        if not self._agrees(tokenizer):
            self._search, self.specials, self.words = None, False, False

    def cut(self, text: str) -> list[str]:
        """The segments of `text`, in order; joined they are `text`. At least one, which may be empty."""
        bounds = [0, *self._cuts(text), len(text)]
        parts = [text[begin:end] for begin, end in pairwise(bounds)]
        if not self.words or len(text) <= 2 * self._chunk:
            return parts
        return [chunk for part in parts for chunk in _chunks(part, self._chunk)]

    def _cuts(self, text: str) -> list[int]:
        if self._search is None:
            return []
        if self._all_safe:
            return [match.start() for match in self._search.finditer(text) if match.start()]
        safe = self._safe
        return [m.start() for m in self._search.finditer(text) if m.start() and m.group() in safe]

    def _agrees(self, tokenizer: Tokenizer) -> bool:
        specials = sorted(self._safe)[:8] or [""]
        texts = [
            before + probe + special + after
            for special in specials
            for probe in _PROBES
            for before, after in (("", ""), (special, "word"), ("", "\n" + probe), (special + special, " x"))
        ]
        texts.append("some words in a row, " * (1 + 3 * self._chunk // 20))
        for text in texts:
            joined = [token for ids in tokenizer.encode_batch(self.cut(text)) for token in ids]
            if joined != tokenizer.encode(text, add_special_tokens=False):
                return False
        return True


def special_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """(ids put in front of, behind) every text that is encoded with special tokens; None if that varies."""
    found = None
    for probe in (*_PROBES, ""):
        plain = tokenizer.encode(probe, add_special_tokens=False)
        whole = tokenizer.encode(probe, add_special_tokens=True)
        if not plain and found is not None:
            if whole != [*found[0], *found[1]]:
                return None
            continue
        lead = len(whole) - len(plain)
        splits = [k for k in range(lead + 1) if whole[k : k + len(plain)] == plain]
        if len(splits) != 1:
            return None
        affixes = (whole[: splits[0]], whole[splits[0] + len(plain) :])
        if found not in (None, affixes):
            return None
        found = affixes
    return found


def _chunks(part: str, size: int) -> list[str]:
    chunks, begin = [], 0
    while len(part) - begin > 2 * size:
        match = _WORDS.search(part, begin + size)
        if match is None:
            break
        end = match.start() + 1
        chunks.append(part[begin:end])
        begin = end
    chunks.append(part[begin:])
    return chunks


def _reaches_words(added: str) -> bool:
    """Whether an added token might lie across a cut between words, strip the space there, or stand alone on
    one side of it only. Texts are normalized before some tokens are looked for: so is the token (U+212A, the
    kelvin sign, becomes a K)."""
    forms = (added, unicodedata.normalize("NFC", added))
    return any(re.search(r"\A ?[A-Za-z]|[A-Za-z] ?\Z|[A-Za-z] [A-Za-z]", form) for form in forms)


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Whether the pre-tokenizer is one for which cuts between words are safe (see the module docstring)."""
    spec = json.loads(tokenizer.backend.to_str())
    normalizer, pre = spec["normalizer"], spec["pre_tokenizer"]
    # NFC joins a letter with marks that follow it, and a space follows here.
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if pre is None or spec["model"]["type"] != "BPE":
        return False
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    splits = False
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                splits = splits or step.get("use_regex", True)
            case "Split" if step["behavior"] == "Isolated" and not step["invert"]:
                if step["pattern"].get("Regex") not in _KNOWN_PATTERNS:
                    return False
                splits = True
            case "Digits":
                pass
            case _:
                return False
    return splits
