"""What a client may have meant by a path that is not served."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

__all__ = ["no_such_path"]

_NOT_SERVED = {
    "/v1/responses": "only a gateway whose setting responses.store_seconds is set stores responses",
    "/v1/messages/batches": "send the requests one by one; priority_class: batch lets others go first",
    "/v1/moderations": "there is no moderation here",
    "/v1/images": "models here read and write text only",
    "/v1/audio": "models here read and write text only",
    "/v1/videos": "models here read and write text only",
    "/v1/realtime": "models here read and write text only",
    "/rerank": "use /v1/rerank",
    "/score": "use /v1/score",
    "/v1/files": "nothing is stored here",
    "/v1/uploads": "nothing is stored here",
    "/v1/batches": "send the requests one by one; priority_class: batch lets others go first",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/vector_stores": "nothing is stored here",
    "/api/generate": "use /v1/completions, OpenAI's form",
    "/api/chat": "use /v1/chat/completions, OpenAI's form",
    "/tokenizer_info": "an engine serves it with --tokenizer-info, a gateway with server.tokenizer_info",
    "/generate": "use /v1/completions, OpenAI's form",
}
_LONGEST = 200


def no_such_path(path: str, served: Sequence[str]) -> str:
    """The message of a 404. `served`: the paths that are."""
    shown = path if len(path) <= _LONGEST else path[:_LONGEST] + "…"
    hint = _hint(path, served) if len(path) <= _LONGEST else None
    return f"no such path: {shown}" + (f"; {hint}" if hint else "")


def _hint(path: str, served: Sequence[str]) -> str | None:
    bare = "/" + path.strip("/")
    if f"/v1{bare}" in served:
        return "a client's base URL ends in /v1"
    if bare.startswith("/v1/v1/"):
        return "the path has /v1 twice: a client's base URL ends in one"
    for known, instead in _NOT_SERVED.items():
        if bare == known or bare.startswith(known + "/"):
            return instead
    close = get_close_matches(bare.lower(), served, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else None
