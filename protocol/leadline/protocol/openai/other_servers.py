"""Fields of vLLM's requests that Leadline does not honour.

They are refused where an answer without them would not be what was asked for, and otherwise named in the
header X-Leadline-Skipped. Every kind of request has them, so that none is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

__all__ = ["NOT_OF_OURS", "SKIPPED", "OtherServersFields"]

NOT_OF_OURS = {
    "logprob_token_ids": "use logprobs with top_logprobs",
    "watermarking": "leave it out: answers have no watermark",
    "kv_transfer_params": "leave it out: the KV cache stays in its engine",
    "ec_transfer_params": "leave it out: the KV cache stays in its engine",
    "vllm_xargs": "use the fields of this API",
    "repetition_detection": "use stop, max_tokens or repetition_penalty",
}
"""Refused, and what there is instead."""

SKIPPED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "request_id": (),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (False,),
    "mm_payload": ("tensors",),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Skipped, and the values beside null that ask for nothing."""


class OtherServersFields(msgspec.Struct, kw_only=True):
    """See the module's docstring."""

    logprob_token_ids: Annotated[list[Any], Meta(max_length=0)] | None = None
    watermarking: Literal[False] | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    vllm_xargs: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    repetition_detection: None = None

    length_penalty: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None
    request_id: Any = None
    return_weight_versions: Any = None
    routed_experts_prompt_start: Any = None
    return_token_offsets: Any = None
    return_prompt_text: Any = None
    return_mm_kwargs: Any = None
    mm_payload: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    not_supported: ClassVar[Mapping[str, str]] = NOT_OF_OURS

    @property
    def skipped_header(self) -> dict[str, str]:
        """The header that names them, where there are any."""
        skipped = self.skipped_fields
        return {"X-Leadline-Skipped": ", ".join(skipped)} if skipped else {}

    @property
    def skipped_fields(self) -> list[str]:
        """Those of SKIPPED that ask for something."""
        return [
            name
            for name, nothing in SKIPPED.items()
            if (value := getattr(self, name)) is not None and value not in nothing
        ]
