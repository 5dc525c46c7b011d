"""Structured output: a grammar's allowed next tokens as a bit mask.

Owns the bridge to llguidance (Earley parser over a lexer, masks computed against a trie of the vocabulary).
The frontend compiles every spec once to reject bad ones with a 400 before they reach the core; the engine
core, in its own process, builds a `GrammarCompiler` of its own from the model folder and keeps one `Matcher`
per running sequence.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from leadline.engine.errors import RequestError
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "Matcher"]

_CACHED_GRAMMARS = 256

# JSON allows any amount of whitespace between tokens, and small models can get lost in it.
_WHITESPACE = r"[ \t\n\r]{0,20}"

_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Those that llguidance holds a text to; it refuses any other, which JSON Schema says to ignore (2020-12,
validation, 7.2.3). Types of pydantic bring them: Path, SecretStr, bytes."""
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OF_VALUES = frozenset({"const", "enum", "default", "examples"})


class Matcher:
    """Follows one sequence through a grammar. Not safe for threads."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: Sequence[int], mask_words: int) -> None:
        self._matcher = matcher
        self._eos = tuple(eos_token_ids)
        self._scratch: NDArray[np.int32] = np.zeros(mask_words, dtype=np.int32)
        self._ended = False

    @property
    def finished(self) -> bool:
        """Nothing but EOS may follow (or EOS has come): the sequence can be ended now."""
        return self._ended or bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the matcher gave up (a limit of the parser was hit), else None. Then it is `finished` too."""
        return _sentence(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self, out: NDArray[np.int32]) -> None:
        """Write the allowed tokens of the next position to `out`, int32 [ceil(V / 32)], bit set = allowed.

        EOS is allowed exactly where the grammar is complete; once `finished`, EOS is all that is. Bits of ids
        beyond the tokenizer's vocabulary are 0.
        """
        out[:] = 0
        if self.finished:
            for token_id in self._eos:
                out[token_id >> 5] |= np.int32(np.uint32(1 << (token_id & 31)).view(np.int32))
            return
        self._matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        words = min(len(out), len(self._scratch))
        out[:words] = self._scratch[:words]

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False when the grammar does not allow it (then the matcher has not moved)."""
        if self._ended or self._matcher.is_stopped():
            self._ended = self._ended or token_id in self._eos
            return token_id in self._eos
        if token_id in self._eos:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        return self._matcher.try_consume_tokens([token_id]) == 1


class GrammarCompiler:
    """Compiles specs for one tokenizer. Safe for threads.

    `vocab_size`: width of the model's logits when it differs from the tokenizer's vocabulary. The vocabulary
    trie (a few hundred milliseconds) is built on first use; compiled grammars are kept, most recently used
    last.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        self._eos = tuple(eos_token_ids) or tokenizer.eos_token_ids
        self._trie: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredSpec, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> GrammarCompiler:
        """For the engine core's process: load the tokenizer of a model folder."""
        return cls(Tokenizer.load(folder), vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    @property
    def mask_words(self) -> int:
        """Length of the int32 masks: ceil(vocabulary / 32)."""
        return (self._vocab_size + 31) // 32

    def validate(self, spec: StructuredSpec) -> None:
        """Raise RequestError with the compiler's complaint when the spec cannot be used."""
        self._prototype(spec)

    def matcher(self, spec: StructuredSpec) -> Matcher:
        """A matcher at the start of the grammar. Raises RequestError like `validate`."""
        return Matcher(self._prototype(spec).deep_copy(), self._eos, self.mask_words)

    def _prototype(self, spec: StructuredSpec) -> llguidance.LLMatcher:
        with self._lock:
            if (known := self._compiled.get(spec)) is not None:
                self._compiled.move_to_end(spec)
                return known
            trie = self._vocabulary()
        # Outside the lock: compiling releases the GIL and may take long for a large schema.
        try:
            matcher = llguidance.LLMatcher(trie, _grammar(spec), log_level=0)
        except ValueError as error:  # JSON that does not parse, text that has no UTF-8 form
            raise _rejected(spec, str(error)) from error
        except RecursionError:
            raise _rejected(spec, "it is nested too deeply") from None
        if matcher.is_error():
            raise _rejected(spec, matcher.get_error())
        with self._lock:
            self._compiled[spec] = matcher
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._trie is None:
            if not self._eos:
                raise RequestError(
                    "structured output needs a model with an EOS token, and this one names none",
                    param="response_format",
                )
            try:
                self._trie = llguidance.LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=list(self._eos)
                )
            except ValueError as error:
                raise RequestError(
                    f"structured output is not available for this model's tokenizer: {error}",
                    param="response_format",
                ) from error
        return self._trie


def _grammar(spec: StructuredSpec) -> str:
    """The spec in llguidance's own form. Regexes and Lark grammars are checked later, when they are
    compiled."""
    match spec.kind:
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.value)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(spec.value)
        case "json_object" | "json_schema":
            schema = '{"type": "object"}' if spec.kind == "json_object" else _known_formats(spec.value)
            return llguidance.LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )


def _known_formats(schema: str) -> str:
    """A JSON schema without the formats that say nothing here."""
    return json.dumps(_without_formats(json.loads(schema))) if '"format"' in schema else schema


def _without_formats(schema: Any, names: bool = False) -> Any:
    """`names`: it maps names to schemas, and "format" would be one of them."""
    if isinstance(schema, list):
        return [_without_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if not names and key in _OF_VALUES
        else _without_formats(value, not names and key in _OF_NAMES)
        for key, value in schema.items()
        if names or key != "format" or not isinstance(value, str) or value in _FORMATS
    }


def _rejected(spec: StructuredSpec, complaint: str) -> RequestError:
    reason = _sentence(complaint)
    what = {"json_object": "JSON object", "json_schema": "JSON schema", "regex": "regular expression"}.get(
        spec.kind, "grammar"
    )
    return RequestError(
        f"the {what} for structured output cannot be used: {reason}",
        param={"regex": "regex", "lark": "grammar"}.get(spec.kind, "response_format"),
        code="invalid_grammar",
    )


def _sentence(complaint: str) -> str:
    """The compiler appends its parser state after a marker; callers only need the sentence before it."""
    return complaint.split("\n<state>")[0].strip()
