"""Requests of the pooling APIs, checked, tokenized and turned into `PoolingRequest`s.

    text                 special tokens of the tokenizer around [the model's prompt +] the text
    token ids            taken as they are
    pair, of an encoder  the tokenizer's special tokens around and between both texts
    pair, of a decoder   the two texts in Qwen3-Reranker's template

An input beyond the model's limit is refused, or cut at its end where the request has
`truncate_prompt_tokens`: special tokens and the first text of a pair stay whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from leadline.engine.config import EngineConfig
from leadline.engine.errors import RequestError, UnsupportedModel
from leadline.engine.messages import PoolingRequest
from leadline.engine.pooling.spec import PoolingSpec
from leadline.protocol.openai.pooling import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["PoolingBuilder"]

_PROBE = "a"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(slots=True, frozen=True)
class _Frame:
    """Tokens around a text, or around and between two."""

    before: list[int]
    between: list[int]
    behind: list[int]
    boundary: int | None = None
    """Of a pair: how many tokens of `between` belong to the first text; None: both texts have one type."""

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)


class PoolingBuilder:
    """Admits requests to one model that embeds or reranks. Safe for threads."""

    def __init__(self, config: EngineConfig, spec: PoolingSpec, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedModel for a tokenizer whose special tokens cannot be told from the text."""
        self.spec = spec
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = spec.model.vocab_size
        self._single = _frame_of_one(tokenizer)
        self._pair = _frame_of_pair(tokenizer)
        if spec.answers is not None:
            plain = [tokenizer.encode(text, False) for text in (_BEFORE, _BEHIND)]
            self._single = _Frame(plain[0], [], plain[1])

    @property
    def limit(self) -> int:
        """Tokens of the longest input."""
        return self.spec.max_tokens

    def embeddings(
        self, body: EmbeddingRequest, arrival: float, request_id: str | None = None
    ) -> PoolingRequest:
        """Raises RequestError."""
        self._check_dimensions(body.dimensions)
        inputs, prompt = body.inputs(), self._prompt(body.prompt_name)
        cut = self._cut(body.truncate_prompt_tokens, self._single.size)
        if isinstance(inputs[0], str):
            texts = [prompt + text for text in inputs if isinstance(text, str)]
            tokens = [self._framed(ids, cut) for ids in self._encoded(texts, "input")]
        else:
            if body.prompt_name is not None:
                raise RequestError("prompt_name goes with texts, not with token ids", param="prompt_name")
            tokens = [self._checked(ids, index)[:cut] for index, ids in enumerate(inputs)]  # type: ignore[arg-type]
        for index, ids in enumerate(tokens):
            self._check_length(len(ids), f"input[{index}]" if len(tokens) > 1 else "the input", "input")
        return self._request(body, tokens, arrival, request_id, dimensions=body.dimensions)

    def pairs(
        self,
        body: RerankRequest | ScoreRequest,
        pairs: Sequence[tuple[str, str]],
        arrival: float,
        request_id: str | None = None,
    ) -> PoolingRequest:
        """`pairs`: those of `body`. Raises RequestError."""
        first, second = ("query", "documents") if isinstance(body, RerankRequest) else ("text_1", "text_2")
        if self.spec.answers is not None:
            return self._request(body, self._judged(body, pairs, second), arrival, request_id)
        if body.instruction is not None:
            raise RequestError(
                "instruction goes with a model that reads one; this one does not", param="instruction"
            )
        frame = self._pair
        cut = self._cut(body.truncate_prompt_tokens, frame.size)
        firsts = self._encoded(list(dict.fromkeys(one for one, _ in pairs)), first)
        known = dict(zip(dict.fromkeys(one for one, _ in pairs), firsts, strict=True))
        inputs, boundaries = [], []
        for index, ((one, _), other) in enumerate(
            zip(pairs, self._encoded([two for _, two in pairs], second), strict=True)
        ):
            query = known[one]
            if cut is not None:
                if len(query) + frame.size >= cut:
                    raise self._too_long(len(query) + frame.size, f"{first} alone", first)
                other = other[: cut - frame.size - len(query)]
            inputs.append([*frame.before, *query, *frame.between, *other, *frame.behind])
            boundaries.append(len(frame.before) + len(query) + (frame.boundary or 0))
            self._check_length(len(inputs[-1]), f"the pair with {second}[{index}]", second)
        typed = None if frame.boundary is None else boundaries
        return self._request(body, inputs, arrival, request_id, boundaries=typed)

    def _judged(
        self, body: RerankRequest | ScoreRequest, pairs: Sequence[tuple[str, str]], param: str
    ) -> list[list[int]]:
        """Return the prompts of pairs for a decoder that judges by answering yes or no."""
        task = body.instruction or INSTRUCTION
        texts = [f"<Instruct>: {task}\n<Query>: {one}\n<Document>: {other}" for one, other in pairs]
        cut = self._cut(body.truncate_prompt_tokens, self._single.size)
        inputs = [self._framed(ids, cut) for ids in self._encoded(texts, param)]
        for index, ids in enumerate(inputs):
            self._check_length(len(ids), f"the pair with {param}[{index}]", param)
        return inputs

    def _request(
        self,
        body: PoolingFields,
        inputs: list[list[int]],
        arrival: float,
        request_id: str | None,
        *,
        boundaries: list[int] | None = None,
        dimensions: int | None = None,
    ) -> PoolingRequest:
        wait = body.queue_timeout
        return PoolingRequest(
            request_id=request_id or uuid.uuid4().hex,
            inputs=inputs,
            boundaries=boundaries,
            dimensions=dimensions,
            priority_class=body.priority_class or "interactive",
            arrival=arrival,
            queue_timeout=self._config.queue_timeout if wait is None else wait,
            deadline=None if body.deadline is None else arrival + body.deadline,
        )

    def _encoded(self, texts: list[str], param: str) -> list[list[int]]:
        try:
            encoded = self._tokenizer.encode_batch(texts)
        except RequestError as error:
            error.param = param
            raise
        largest = max((max(ids) for ids in encoded if ids), default=0)
        if largest >= self._vocab_size:
            raise RequestError(
                f"{param} holds {self._tokenizer.token_str(largest)!r}, which the tokenizer makes token "
                f"{largest}, but the model's vocabulary ends at {self._vocab_size - 1}",
                param=param,
            )
        return encoded

    def _framed(self, ids: list[int], cut: int | None) -> list[int]:
        frame = self._single
        kept = ids if cut is None else ids[: cut - frame.size]
        return [*frame.before, *kept, *frame.behind]

    def _checked(self, ids: list[int], index: int) -> list[int]:
        if max(ids) >= self._vocab_size:
            raise RequestError(
                f"input[{index}] holds the token id {max(ids)}, but the vocabulary ends at "
                f"{self._vocab_size - 1}",
                param="input",
            )
        return ids

    def _prompt(self, name: str | None) -> str:
        prompts = self.spec.prompts
        if name is None:
            name = self.spec.default_prompt
            return "" if name is None else prompts[name]
        if name not in prompts:
            known = (
                f"one of {', '.join(map(repr, prompts))}"
                if prompts
                else "left out: this model has no prompts"
            )
            raise RequestError(f"prompt_name must be {known}, got {name[:100]!r}", param="prompt_name")
        return prompts[name]

    def _check_dimensions(self, asked: int | None) -> None:
        size, allowed = self.spec.model.hidden_size, self.spec.dimensions
        if asked is None:
            return
        if allowed and asked not in (*allowed, size):
            raise RequestError(
                f"dimensions must be one of {', '.join(map(str, (*allowed, size)))}, got {asked}",
                param="dimensions",
            )
        if asked > size:
            raise RequestError(f"dimensions must be at most {size}, got {asked}", param="dimensions")

    def _cut(self, asked: int | None, special: int) -> int | None:
        """Tokens that an input is cut to; None: it is not cut."""
        if asked is None:
            return None
        most = self.limit if asked == -1 else asked
        if most <= special:
            raise RequestError(
                f"truncate_prompt_tokens must be above the {special} tokens around each text, got {asked}",
                param="truncate_prompt_tokens",
            )
        return most

    def _check_length(self, tokens: int, what: str, param: str) -> None:
        if not tokens:
            raise RequestError(f"{what} must hold at least one token", param=param)
        if tokens > self.limit:
            raise self._too_long(tokens, what, param)

    def _too_long(self, tokens: int, what: str, param: str) -> RequestError:
        # Clients tell this error by how it begins, which is how OpenAI begins it.
        return RequestError(
            f"This model's maximum context length is {self.limit} tokens. However, {what} has {tokens} "
            "tokens: shorten it, or set truncate_prompt_tokens to -1 to cut its end",
            param=param,
            code="context_length_exceeded",
        )


def _frame_of_one(tokenizer: Tokenizer) -> _Frame:
    plain, whole = tokenizer.encode(_PROBE, False), tokenizer.encode(_PROBE)
    at = _find(plain, whole)
    return _Frame(whole[:at], [], whole[at + len(plain) :])


def _frame_of_pair(tokenizer: Tokenizer) -> _Frame:
    plain = tokenizer.encode(_PROBE, False)
    encoding = tokenizer.backend.encode(_PROBE, _PROBE)
    ids, types = encoding.ids, encoding.type_ids
    first = _find(plain, ids)
    begin = first + len(plain)
    second = begin + _find(plain, ids[begin:])
    boundary = None
    if types[first] != types[second]:
        boundary = sum(kind == types[first] for kind in types[begin:second])
    return _Frame(ids[:first], ids[begin:second], ids[second + len(plain) :], boundary)


def _find(part: list[int], whole: list[int]) -> int:
    for at in range(len(whole) - len(part) + 1):
        if whole[at : at + len(part)] == part:
            return at
    raise UnsupportedModel("the tokenizer changes a text when it puts special tokens around it")
