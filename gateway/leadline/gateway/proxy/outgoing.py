"""What a pod is sent: the client's request, its body byte for byte, and what the pod must know besides.

Room: gateway/proxy; pure but for the clock. Which fields are added, and why, is told in README.md.
"""

import time

from leadline.gateway.pods import Pod
from leadline.gateway.proxy.body import amended
from leadline.gateway.proxy.call import Call
from leadline.gateway.proxy.headers import request_head
from leadline.gateway.proxy.settings import ProxySettings

__all__ = ["request_for"]

_WORTH_TELLING = 0.05
"""Seconds of a deadline that must be gone before the pod is told of them."""


def request_for(
    call: Call, pod: Pod, settings: ProxySettings, *, movable: bool, extra: dict[str, object]
) -> tuple[bytes, bytes]:
    """Head and body. `movable`: ask for what it takes to move the stream. `extra`: fields that count above
    all others, of a stream that goes on."""
    body = amended(call.incoming.body, **(_fields(call, pod, movable) | extra))
    head = request_head(
        call.path,
        call.headers,
        pod.address,
        len(body),
        key=call.service.api_key,
        client=call.client,
        plain=movable,
    )
    return head, body


def _fields(call: Call, pod: Pod, movable: bool) -> dict[str, object]:
    """What the pod's body must say that the client's does not."""
    fields: dict[str, object] = {}
    request = call.incoming.fields
    model = call.service.upstream_model(request.model, pod) if request.model is not None else None
    if model is not None:
        fields["model"] = model
    if movable:
        if not getattr(request, "return_token_ids", None):
            fields["return_token_ids"], fields["return_prompt_token_ids"] = True, False
        if request.seed is None:
            fields["seed"] = call.seed
        fields |= call.identity
    if call.batch:
        fields["priority_class"] = "batch"
    if call.patience is not None:
        fields["queue_timeout"] = call.patience
    if call.deadline is not None:
        now = time.monotonic()
        if now - call.arrived > _WORTH_TELLING:
            fields["deadline"] = max(0.001, call.deadline - now)
    return fields
