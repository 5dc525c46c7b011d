"""What the gateway reads of a request body, and how it adds fields to one without touching the rest.

A body is parsed once, into the protocol's own request type, because the tokenizer needs all that becomes
prompt. Where no tokenizer is at work (approximate matching, engines of others) a body that Leadline's engine
would refuse may be fine: then `Peek`, the few fields that routing needs, is enough.

Fields are added at the end of the JSON object; of two equal keys JSON readers take the last:

    {"model": "m", "messages": [...]}   ──▶   {"model": "m", "messages": [...],"seed":7}
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from leadline.protocol.errors import RequestError
from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest, InvalidBody, decode_body
from leadline.protocol.openai.common import PriorityClass
from leadline.protocol.openai.pooling import PoolingFields
from leadline.protocol.openai.service import DetokenizeRequest, TokenizeRequest
from leadline.protocol.text.prompts import PromptRequest

__all__ = ["Incoming", "amended", "read_incoming", "read_pooling"]

_encode = msgspec.json.Encoder().encode


class Peek(msgspec.Struct, kw_only=True):
    """What routing needs of any OpenAI-like body. The last three fields are ours alone, with our ranges: the
    gateway acts on them before a pod can refuse them."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    user: str | None = None
    seed: int | None = None
    deadline: Annotated[float, Meta(gt=0)] | None = None
    queue_timeout: Annotated[float, Meta(ge=0)] | None = None
    priority_class: PriorityClass | None = None


class Incoming(msgspec.Struct, kw_only=True):
    """A request as it came, and the fields that the gateway reads."""

    kind: type[Any]
    """The type of the body, by its path."""
    body: bytes
    fields: Any
    """ChatCompletionRequest, CompletionRequest, PoolingFields or Peek."""
    full: PromptRequest | None
    """What becomes prompt, where all of it is known; of most requests, `fields`."""
    request: Any = None
    """The body as it was decoded, of a request that only the gateway or one pod answers."""
    session: str | None = None
    """What keeps requests on one pod with the policy `session`."""
    pinned: bool = False
    """Its stream cannot go on on another pod."""
    fault: InvalidBody | None = None
    """Why it is not a request of ours, though it may be one of another engine."""

    @property
    def chat(self) -> bool:
        """Whether the pods answer with chunks of a chat."""
        return self.kind is ChatCompletionRequest

    @property
    def stream(self) -> bool:
        return bool(self.fields.stream)

    @property
    def max_tokens(self) -> int | None:
        fields = self.fields
        longer: int | None = getattr(fields, "max_completion_tokens", None)
        limit: int | None = longer if longer is not None else fields.max_tokens
        return None if limit is not None and limit < 0 else limit

    @property
    def choices(self) -> int:
        """Sequences that will be generated."""
        full = self.full
        n = max(self.fields.n or 1, getattr(full, "best_of", None) or 1)
        if isinstance(full, CompletionRequest) and isinstance(full.prompt, list):
            first = full.prompt[0]
            return n if isinstance(first, int) else n * len(full.prompt)
        return n

    @property
    def resumable(self) -> bool:
        """Its stream is one sequence, so it can go on behind the tokens sent."""
        return self.stream and self.full is not None and self.choices == 1 and not self.pinned


def read_incoming(body: bytes, kind: type[Any]) -> Incoming:
    """Read a request of the type `kind`: a PromptRequest, a DetokenizeRequest, or one with a method `chat`
    that makes it a chat.

    Raises RequestError 400 for what is no JSON object or has wrong types where the gateway must look."""
    try:
        request = decode_body(body, kind)
        if isinstance(request, TokenizeRequest | DetokenizeRequest):
            full = request if isinstance(request, TokenizeRequest) else None
            return Incoming(
                kind=kind, body=body, fields=Peek(model=request.model), full=full, request=request
            )
        if isinstance(request, PromptRequest):
            return Incoming(kind=kind, body=body, fields=request, full=request, session=_session_of(request))
        chat = request.chat()
        return Incoming(
            kind=kind,
            body=body,
            fields=chat,
            full=chat,
            session=getattr(request, "session", None) or _session_of(chat),
            pinned=getattr(request, "is_pinned", False),
        )
    except InvalidBody as error:
        fault = error
    try:
        peek = decode_body(body, Peek)
    except InvalidBody:
        raise invalid(fault) from None
    return Incoming(kind=kind, body=body, fields=peek, full=None, session=peek.user, fault=fault)


def _session_of(request: PromptRequest) -> str | None:
    return getattr(request, "session_id", None) or getattr(request, "user", None)


def read_pooling(body: bytes) -> Incoming:
    """Read what routing needs of a request for vectors or scores; the pod reads the rest. Raises RequestError
    400 for what is no JSON object or has wrong types where the gateway must look."""
    try:
        fields = decode_body(body, PoolingFields)
    except InvalidBody as error:
        raise invalid(error) from None
    return Incoming(kind=PoolingFields, body=body, fields=fields, full=None, session=fields.user)


def invalid(fault: InvalidBody) -> RequestError:
    """The answer to a body that cannot be served."""
    return RequestError(fault.message, param=fault.param, code="invalid_body")


def amended(body: bytes, **fields: object) -> bytes:
    """The body with these fields set. `body` is a JSON object with at least one key."""
    if not fields:
        return body
    added = b",".join([b'"%s":%s' % (name.encode(), _encode(value)) for name, value in fields.items()])
    return body[: body.rindex(b"}")] + b"," + added + b"}"
