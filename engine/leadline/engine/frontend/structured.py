"""Structured output: a grammar's allowed next tokens as a bit mask.

Owns the bridge to llguidance (Earley parser over a lexer, masks computed against a trie of the vocabulary):
what a spec becomes there, the bounds of what it may cost, and what is refused beforehand. A served grammar
runs in a process of its own (`grammar_host`); `LLM` also compiles in its own, to refuse at once.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from leadline.engine.errors import RequestError
from leadline.engine.frontend.json_schema import SchemaError, portable
from leadline.engine.frontend.lark_rules import has_finite_text
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "Matcher", "check_length", "rejected"]

_CACHED_GRAMMARS = 64

_LONGEST = {"json_schema": 1 << 20, "regex": 1 << 16, "lark": 1 << 18}
"""Characters of a spec, by its kind. A mask costs about 0.3 ms a thousand characters of a regular
expression, at each step."""

# JSON allows any amount of whitespace between tokens, and small models can get lost in it.
_WHITESPACE = r"[ \t\n\r]{0,20}"

_TRIAL_TOKENS = 24
_TRIAL_TOKENS_AT_LEAST = 6
_TRIAL_SECONDS = 0.25
_IN_SCHEMA = "failed to compile JSON schema: "
_NO_TEXT = "no text satisfies it"
_TOO_COMPLEX = "it is too complex: simplify nested repetitions, or use fewer optional properties"


def _limits() -> llguidance.LLParserLimits:
    """Ten times the library's fuel a step: its own ends `^(\\w{1,30} ?){20,60}$` in the middle of an answer.
    A row of 8000 items is that of 2000 optional properties."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=4_000_000,
        step_lexer_fuel=2_000_000,
        step_max_items=200_000,
        max_items_in_row=8_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


class Matcher:
    """Follows one sequence through a grammar. Not safe for threads."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: Sequence[int], mask_words: int) -> None:
        self._matcher = matcher
        self._eos = tuple(eos_token_ids)
        self._scratch: NDArray[np.int32] = np.zeros(mask_words, dtype=np.int32)
        self._ended = False

    @property
    def finished(self) -> bool:
        """Nothing but EOS may follow (or EOS has come): the sequence can be ended now. False after an
        `error`, where it cannot tell what may follow."""
        return self._ended or (bool(self._matcher.is_stopped()) and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why the matcher gave up (a limit of the parser was hit, or no text can go on), else None."""
        return _reason(self._matcher) if self._matcher.is_error() else None

    def mask(self, out: NDArray[np.int32]) -> None:
        """Write the allowed tokens of the next position to `out`, int32 [ceil(V / 32)], bit set = allowed.

        EOS is allowed exactly where the grammar is complete; once `finished`, EOS is all that is. Bits of ids
        beyond the tokenizer's vocabulary are 0. All are 0 after an `error`: look at it first.
        """
        out[:] = 0
        if not self.finished and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
            if not self._matcher.is_error() and not self._matcher.is_stopped():
                words = min(len(out), len(self._scratch))
                out[:words] = self._scratch[:words]
                return
        if self.finished:
            for token_id in self._eos:
                out[token_id >> 5] |= np.int32(np.uint32(1 << (token_id & 31)).view(np.int32))

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False when the grammar does not allow it (then the matcher has not moved) or
        the matcher gave up (then there is an `error`)."""
        if self._matcher.is_error():
            return False
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
        self._compiled: OrderedDict[tuple[str, str, str], llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> GrammarCompiler:
        """Load the tokenizer of a model folder."""
        return cls(Tokenizer.load(folder), vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    @property
    def mask_words(self) -> int:
        """Length of the int32 masks: ceil(vocabulary / 32)."""
        return (self._vocab_size + 31) // 32

    def prepare(self) -> None:
        """Build the vocabulary's trie now. Raises RequestError where this model cannot be constrained."""
        with self._lock:
            self._vocabulary()

    def validate(self, spec: StructuredSpec) -> None:
        """Raise RequestError with the compiler's complaint when the spec cannot be used."""
        self._prototype(spec)

    def matcher(self, spec: StructuredSpec) -> Matcher:
        """A matcher at the start of the grammar. Raises RequestError like `validate`."""
        return Matcher(self._prototype(spec).deep_copy(), self._eos, self.mask_words)

    def _prototype(self, spec: StructuredSpec) -> llguidance.LLMatcher:
        check_length(spec)
        key = spec.kind, spec.value, spec.calls
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                # Copies share its lexer: one that a copy has broken fails for all.
                if _usable(known, self.mask_words):
                    self._compiled.move_to_end(key)
                    return known
                del self._compiled[key]
            trie = self._vocabulary()
        # Outside the lock: compiling releases the GIL and may take long for a large schema.
        try:
            matcher = llguidance.LLMatcher(trie, _grammar(spec), log_level=0, limits=_limits())
            if matcher.is_error():
                raise SchemaError(_reason(matcher))
            self._try_out(matcher)
        except ValueError as error:  # also JSON that does not parse, text that has no UTF-8 form
            raise rejected(spec, str(error)) from error
        except RecursionError:
            raise rejected(spec, "it is nested too deeply") from None
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _try_out(self, prototype: llguidance.LLMatcher) -> None:
        """Follow a copy some tokens far along a random text: what fails here would fail in an answer. Raises
        SchemaError."""
        matcher = Matcher(prototype.deep_copy(), self._eos, self.mask_words)
        mask = np.zeros(self.mask_words, dtype=np.int32)
        pick = random.Random(0)
        ends = time.thread_time() + _TRIAL_SECONDS
        for count in range(_TRIAL_TOKENS):
            matcher.mask(mask)
            if matcher.error is not None:
                raise SchemaError(matcher.error)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, self._eos)]
            if matcher.finished or not len(allowed):
                return
            if count >= _TRIAL_TOKENS_AT_LEAST and time.thread_time() > ends:
                return
            # Blanks between JSON's tokens are allowed nearly everywhere, and lead nowhere.
            some = [int(token_id) for token_id in pick.choices(allowed, k=8)]
            text = [i for i in some if self._tokenizer.token_bytes(i).strip()]
            if not matcher.accept((text or some)[0]):
                raise SchemaError(matcher.error or _NO_TEXT)

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


def _usable(prototype: llguidance.LLMatcher, mask_words: int) -> bool:
    probe = prototype.deep_copy()
    probe.compute_bitmask()
    return not probe.is_error()


def _grammar(spec: StructuredSpec) -> str:
    """The spec in llguidance's own form. Regexes and Lark grammars are checked later, when they are
    compiled. Raises ValueError, SchemaError among its kinds."""
    match spec.kind:
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.value)
        case "lark":
            grammar = _lark(spec.value)
            if not has_finite_text(grammar):
                raise SchemaError(f"{_NO_TEXT}: the rule start never comes to an end")
            return llguidance.LLMatcher.grammar_from_lark(_portable_parts(grammar))
        case "json_object" | "json_schema":
            schema = {"type": "object"} if spec.kind == "json_object" else _object(json.loads(spec.value))
            schema = portable(schema)
            if not spec.calls:
                return llguidance.LLMatcher.grammar_from_json_schema(
                    schema, defaults={"whitespace_pattern": _WHITESPACE}
                )
            schema["x-guidance"] = {"whitespace_pattern": _WHITESPACE}
            return llguidance.LLMatcher.grammar_from_lark(
                f"start: answer | calls\nanswer: %json {json.dumps(schema)}\n{_portable_parts(spec.calls)}"
            )


def _lark(grammar: str) -> str:
    """A grammar in Lark's form, from that or from GBNF. Raises SchemaError."""
    if "::=" not in grammar:
        return grammar
    try:
        return any_to_lark(grammar)
    except GbnfToLarkError as error:
        raise SchemaError(str(error)) from error


def _portable_parts(grammar: str) -> str:
    """A Lark grammar with its JSON schemas made portable. Raises SchemaError."""
    first, *others = grammar.split("%json")
    parts = [first]
    decoder = json.JSONDecoder()
    for other in others:
        at = len(other) - len(other.lstrip())
        try:
            schema, end = decoder.raw_decode(other, at)
        except ValueError:  # in a literal or a comment, or a mistake that the library will name
            schema, end = None, at
        if isinstance(schema, dict) and (rewritten := portable(schema)) != schema:
            other = f" {json.dumps(rewritten)}{other[end:]}"
        parts.append(other)
    return "%json".join(parts)


def check_length(spec: StructuredSpec) -> None:
    """Raise RequestError for a spec that is too long to be compiled."""
    for kind, text in ((spec.kind, spec.value), ("lark", spec.calls)):
        longest = _LONGEST.get(kind, 0)
        if len(text) > longest:
            raise rejected(spec, f"it has {len(text):,} characters; at most {longest:,} are possible")


def _object(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise SchemaError("a schema must be an object")
    return schema


def rejected(spec: StructuredSpec, complaint: str) -> RequestError:
    """The refusal of a spec that cannot be used, for this reason."""
    what = {"json_object": "JSON object", "json_schema": "JSON schema", "regex": "regular expression"}.get(
        spec.kind, "grammar"
    )
    if spec.param == "tools":
        what = "JSON schema of a tool"
    return RequestError(
        f"the {what} for structured output cannot be used: {complaint}",
        param=spec.param or {"regex": "regex", "lark": "grammar"}.get(spec.kind, "response_format"),
        code="invalid_grammar",
    )


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's complaint, in words that help a caller."""
    complaint = str(matcher.get_error()).split("\n<state>")[0].strip()
    if (at := complaint.find(_IN_SCHEMA)) >= 0:  # the grammar around it follows
        complaint = complaint[at + len(_IN_SCHEMA) :].splitlines()[0]
    if "NoExtension" in complaint:
        return _NO_TEXT
    if "oneOf constraints are not supported" in complaint:
        return (
            "the options of a oneOf may overlap, as far as can be told; use anyOf, or give each a required "
            "property with a constant of its own"
        )
    for sign in (
        "too many expressions",
        "Too many items",
        "max is",
        "too large",
        "fuel",
        "states",
        "too big",
    ):
        if sign in complaint:
            return f"{_TOO_COMPLEX} ({complaint.splitlines()[0]})"
    return complaint
