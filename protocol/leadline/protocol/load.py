"""The load report that a pod sends with every heartbeat; a gateway knows no more about its load."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from leadline.protocol.chain import ChainNamespace
from leadline.protocol.wire import decode_msgpack

__all__ = ["MAX_REPORT_BYTES", "LoadReport", "decode_report", "encode_report"]

MAX_REPORT_BYTES = 64 << 10

Count = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class LoadReport(msgspec.Struct, kw_only=True, frozen=True):
    """One heartbeat of one pod. Unknown fields are ignored, so a newer engine may report more."""

    pod: str
    """Name of the pod; with `leadline up`, of the process."""
    address: str
    """host:port of its HTTP API."""
    epoch: Annotated[str, Meta(min_length=1, max_length=256)]
    """Pod UID and start time: changes whenever the pod's cache starts empty."""
    time: NonNegative
    """Seconds since the Unix epoch on the pod's clock, when the report was made."""

    model: str
    """Model id as the prefix chain's namespace has it."""
    revision: str = ""
    tokenizer: str = ""
    """Digest of its tokenizer bundle (`leadline.protocol.text.bundle`); empty: it has none to give."""
    task: str = "generate"
    """What the model is served for: generate, embed or rerank."""
    adapters: list[str] = []
    served_names: list[str] = []
    """What clients may put in a request's `model`."""
    block_size: Annotated[int, Meta(ge=1)]
    """Tokens a KV block."""
    max_model_len: Count = 0
    """Tokens, prompt and output together; 0 if unknown."""

    max_concurrent_requests: Count = 0
    """Requests it runs at once at most, the others wait in it; 0 if unknown."""

    running: Count = 0
    """Requests that hold KV blocks."""
    waiting: Count = 0
    """Requests in the queue."""
    queued_prefill_tokens: Count = 0
    """Prompt tokens still to be computed, of waiting and running requests, prefix hits taken off."""
    free_blocks: Count = 0
    """Blocks that a new request could take, evictable cached ones included."""
    total_blocks: Count = 0
    prefill_tokens_per_second: NonNegative = 0.0
    """Recent rate; 0 until measured."""
    decode_step_seconds: NonNegative = 0.0
    """Recent duration of a step that only decodes; 0 until measured."""
    draining: bool = False
    """Finishes what it has and takes nothing new."""
    cache_seq: Annotated[int, Meta(ge=-1)] = -1
    """Number of the last cache event batch that stood in the stream before this report was sent; -1: none. A
    reader that has read on and does not know that batch has lost some (see events.py)."""

    def namespace(self, *, cache_salt: str = "", adapter: str = "") -> ChainNamespace:
        """What the chain hashes of a request's blocks start from on this pod."""
        return ChainNamespace(
            model=self.model,
            revision=self.revision,
            adapter=adapter,
            cache_salt=cache_salt,
            block_size=self.block_size,
        )


_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(LoadReport)


def encode_report(report: LoadReport) -> bytes:
    """`report` as msgpack."""
    return _encoder.encode(report)


def decode_report(data: bytes) -> LoadReport:
    """The report in `data`; raises WireError for garbage and for more than MAX_REPORT_BYTES."""
    return decode_msgpack(_reports, data, MAX_REPORT_BYTES)
