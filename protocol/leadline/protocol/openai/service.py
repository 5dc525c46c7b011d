"""Everything beside completions: the model list, tokenization, version, administration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from leadline.protocol.chain import FORMAT_VERSION, ChainNamespace
from leadline.protocol.errors import ErrorObject
from leadline.protocol.openai.chat import ChatMessage, CustomTool, ReasoningEffort, Tool, function_tools
from leadline.protocol.openai.common import NonEmptyStr, TokenId
from leadline.protocol.openai.other_servers import NOT_OF_OURS, OtherServersFields

__all__ = [
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ModelCard",
    "ModelList",
    "NotReadyResponse",
    "PrefixChain",
    "PrefixMatching",
    "ResetPrefixCacheResponse",
    "StartProgress",
    "StatusResponse",
    "TokenizeRequest",
    "TokenizeResponse",
    "TokenizerInfoResponse",
    "VersionResponse",
    "WarmupRequest",
    "WarmupResponse",
]


class PrefixChain(msgspec.Struct, kw_only=True, frozen=True):
    """What a server's block hashes start from (`leadline.protocol.chain`), adapter and salt aside."""

    format: str = FORMAT_VERSION
    model: str
    """Model id, which need not be the served name."""
    revision: str
    block_size: Annotated[int, Meta(ge=1)]
    """Tokens a block."""

    def namespace(self, *, cache_salt: str = "", adapter: str = "") -> ChainNamespace:
        """The namespace of a request's blocks. ValueError for another format than this version's."""
        if self.format != FORMAT_VERSION:
            raise ValueError(f"block hashes have the format {self.format!r}, not {FORMAT_VERSION!r}")
        return ChainNamespace(
            model=self.model,
            revision=self.revision,
            adapter=adapter,
            cache_salt=cache_salt,
            block_size=self.block_size,
        )


class PrefixMatching(msgspec.Struct, kw_only=True, frozen=True):
    """How a gateway finds the pod that holds a prompt's beginning."""

    by: Literal["tokens", "text"]
    """tokens: exactly, by the block hashes of the engine. text: by pieces of text it has sent itself."""
    reason: str | UnsetType = UNSET
    """Why by text: configured, no_pod, not_offered, forbidden, unreachable, invalid or differs."""


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "leadline"
    root: str | UnsetType = UNSET
    """Extension, as vLLM has it: the model behind an alias."""
    max_model_len: int | UnsetType = UNSET
    """Extension: tokens, prompt and output together."""
    task: Literal["embed", "rerank"] | UnsetType = UNSET
    """Extension: what the model is served for; absent of a model that generates."""
    prefix_chain: PrefixChain | UnsetType = UNSET
    """Extension: absent when the server caches no prefixes."""
    prefix_matching: PrefixMatching | UnsetType = UNSET
    """Extension of gateways."""


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(OtherServersFields, kw_only=True):
    """Body of `POST /tokenize`: either a text or a conversation, which goes through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Put the model's BOS in front: of a text by default, of a conversation only if this is true."""
    return_token_strs: bool | None = None
    """Show each token's text too."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[Tool | CustomTool] | None = None
    chat_template: None = None

    not_supported: ClassVar[Mapping[str, str]] = {
        **NOT_OF_OURS,
        "chat_template": "use chat_template_kwargs, or a model folder with a chat_template.jinja of your own",
    }

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Expected either `prompt` or `messages` - at `$.prompt`")
        if self.tools:
            self.tools, _ = function_tools(self.tools)


class TokenizeResponse(msgspec.Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    """With `return_token_strs`: the entries of the vocabulary, such as `Ġthe`."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfoResponse(msgspec.Struct, kw_only=True):
    """Answer of `GET /tokenizer_info`."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    """A class of transformers that reads the model's tokenizer.json."""
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    additional_special_tokens: list[str] = []
    added_tokens_decoder: dict[int, str] = {}
    """Id → text of each token that is not in the base vocabulary."""
    vocab_size: int
    chat_template: str | None = None


class VersionResponse(msgspec.Struct, kw_only=True):
    """Answer of `GET /version`."""

    version: str
    resumes_streams: bool | UnsetType = UNSET
    """Of an engine, true: it reports token ids and continues after `resume_token_ids`, so gateways can move
    its streams."""


class StartProgress(msgspec.Struct, kw_only=True, frozen=True):
    """How far a server that starts has come."""

    phase: str
    """In words: "downloading", "loading weights", "capturing CUDA graphs", …"""
    fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the phase that is done; null where its end is not known."""
    detail: str = ""


class StatusResponse(msgspec.Struct, kw_only=True):
    """Answer of `GET /health` and, when it is 200, of `GET /ready`."""

    status: str
    """starting, serving or draining; of /ready: ready."""
    progress: StartProgress | UnsetType = UNSET
    """Present while starting."""


class NotReadyResponse(msgspec.Struct, kw_only=True):
    """Answer of `GET /ready` when it is 503: an error as everywhere, and `progress` while starting."""

    error: ErrorObject
    progress: StartProgress | UnsetType = UNSET


class WarmupRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /admin/warmup`: prompts whose KV shall be in the prefix cache before anyone asks."""

    prompts: Annotated[
        list[NonEmptyStr | Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(min_length=1, max_length=1024),
    ]
    """Texts or lists of token ids, mixed as you like."""
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


class WarmupResponse(msgspec.Struct, kw_only=True):
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens that were in the cache already."""
    seconds: float


class ResetPrefixCacheResponse(msgspec.Struct, kw_only=True):
    """Answer of `POST /admin/reset_prefix_cache`."""

    blocks: int
    """Cached blocks that were dropped."""
