"""`X-Leadline-Explain`: why a pod was picked, as one line of JSON in an answer header.

{"pod": "a", "policy": "prefix", "reason": "soonest of 2", "prompt_tokens": 900, "exact": true, "attempt": 1,
 "pods": [{"pod": "a", "matched_tokens": 832, "requests": 0, "seconds": 0.02, "queue": 0.0, ...}, ...]}

Pods stand in order of their expected seconds, at most `MAX_PODS` of them. ASCII only, as headers must be.
"""

import json

from leadline.gateway.policies.base import Decision, PodScore

__all__ = ["MAX_PODS", "explanation"]

MAX_PODS = 16


def explanation(decision: Decision, *, prompt_tokens: int, exact: bool, attempt: int) -> bytes:
    """The header's value."""
    scores = sorted(
        decision.scores or (decision.picked,),
        key=lambda score: (score.seconds is None, score.seconds or 0.0, -score.matched_tokens),
    )
    return json.dumps(
        {
            "pod": decision.pod.id,
            "policy": decision.policy,
            "reason": decision.reason,
            "prompt_tokens": prompt_tokens,
            "exact": exact,
            "attempt": attempt,
            "pods": [_row(score) for score in scores[:MAX_PODS]],
        },
        separators=(",", ":"),
    ).encode("ascii")


def _row(score: PodScore) -> dict[str, object]:
    row: dict[str, object] = {
        "pod": score.pod,
        "matched_tokens": score.matched_tokens,
        "requests": score.requests,
    }
    if score.seconds is not None:
        row |= {
            "seconds": round(score.seconds, 6),
            "queue": round(score.queue_seconds, 6),
            "prefill": round(score.prefill_seconds, 6),
            "block_wait": round(score.block_wait_seconds, 6),
            "decode": round(score.decode_seconds, 6),
        }
    return row
