"""Requests and answers of the APIs that read texts and write numbers.

/v1/embeddings    OpenAI's: texts or token ids to vectors
/v1/rerank        Jina's and Cohere's: documents in order of their relevance to a query (/v2/rerank too)
/v1/score         vLLM's: a number for each pair of texts
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from leadline.protocol.openai.common import Count, NonEmptyStr, PositiveInt, PriorityClass, TokenIds
from leadline.protocol.openai.completion import Prompt

__all__ = [
    "MAX_INPUTS",
    "Document",
    "Embedding",
    "EmbeddingList",
    "EmbeddingRequest",
    "PoolingFields",
    "PoolingUsage",
    "RankedDocument",
    "RerankAnswer",
    "RerankRequest",
    "Score",
    "ScoreList",
    "ScoreRequest",
]

MAX_INPUTS = 2048
"""Inputs of one request, as in OpenAI's API."""

Texts = Annotated[NonEmptyStr | Annotated[list[NonEmptyStr], Meta(min_length=1)], Meta()]


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that all these requests have. A gateway reads no others."""

    model: str | None = None
    """Served name; null or absent: the only model there is."""
    user: str | None = None
    priority_class: PriorityClass | None = None
    priority: int | None = None
    """vLLM's field. Above 0: class batch; else interactive. `priority_class` wins."""
    queue_timeout: Annotated[float, Meta(ge=0)] | None = None
    """Seconds the request may wait for its first step; then 503."""
    deadline: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from now by which the answer must be complete; then 504."""

    # What a gateway asks of every request; these APIs do not stream, sample or write tokens.
    stream: ClassVar[bool] = False
    n: ClassVar[int] = 1
    seed: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.priority is not None and self.priority_class is None:
            self.priority_class = "batch" if self.priority > 0 else "interactive"


class _Truncated(PoolingFields, kw_only=True):
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Extension, as vLLM has it: use the first so many tokens of a longer input; -1: as many as the model
    takes."""

    def __post_init__(self) -> None:
        PoolingFields.__post_init__(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("Expected `int` >= 1, or -1 - at `$.truncate_prompt_tokens`")


class EmbeddingRequest(_Truncated, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: Prompt
    """A text, several texts, one list of token ids, or several such lists; at most 2048 inputs."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: the vector's float32 values, little-endian."""
    dimensions: PositiveInt | None = None
    """Keep the first so many values of each vector."""
    prompt_name: str | None = None
    """Extension: which of the model's own prompts goes in front of each text, such as `query`."""

    def __post_init__(self) -> None:
        _Truncated.__post_init__(self)
        if isinstance(self.input, list):
            if len({type(item) for item in self.input}) > 1:
                # Written like msgspec's own messages, from which the JSON path is read.
                raise ValueError(
                    "Expected strings, token ids or lists of token ids, but not a mixture - at `$.input`"
                )
            if not isinstance(self.input[0], int) and len(self.input) > MAX_INPUTS:
                raise ValueError(f"Expected `array` of length <= {MAX_INPUTS} - at `$.input`")

    def inputs(self) -> list[str | list[int]]:
        """The inputs one by one, in order: each a text or a list of token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [msgspec.convert(self.input, TokenIds)]
        return list(self.input)  # type: ignore[arg-type]


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: list[float] | str
    """With `encoding_format: base64` a text."""


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Document(msgspec.Struct, kw_only=True):
    text: NonEmptyStr


class _Instructed(_Truncated, kw_only=True):
    instruction: NonEmptyStr | None = None
    """Extension: the task, for models that read one (Qwen3-Reranker)."""


class RerankRequest(_Instructed, kw_only=True):
    """Body of `POST /v1/rerank` and of `POST /v2/rerank`."""

    query: NonEmptyStr
    documents: Annotated[list[NonEmptyStr | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    """Texts, or objects with a `text`."""
    top_n: PositiveInt | None = None
    """Return only so many results; null: all."""
    return_documents: bool | None = None
    """Repeat each document in its result. Default: true, and false on /v2/rerank, as in Jina's and Cohere's
    APIs."""

    def texts(self) -> list[str]:
        """The documents' texts, in order."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RankedDocument(msgspec.Struct, kw_only=True):
    index: Count
    """Position in the request."""
    document: Document | UnsetType = UNSET
    relevance_score: float


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/rerank`: the most relevant document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class ScoreRequest(_Instructed, kw_only=True):
    """Body of `POST /v1/score`. One `text_1` and several `text_2`, or as many of both: then pairs."""

    text_1: Texts
    text_2: Texts

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs, in order."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    def __post_init__(self) -> None:
        _Truncated.__post_init__(self)
        first = 1 if isinstance(self.text_1, str) else len(self.text_1)
        second = 1 if isinstance(self.text_2, str) else len(self.text_2)
        if first not in (1, second):
            raise ValueError(f"Expected one text, or as many as the {second} of `text_2` - at `$.text_1`")
        if second > MAX_INPUTS:
            raise ValueError(f"Expected `array` of length <= {MAX_INPUTS} - at `$.text_2`")


class Score(msgspec.Struct, kw_only=True):
    index: Count
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
