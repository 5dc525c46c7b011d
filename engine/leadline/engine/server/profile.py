"""`POST /admin/profile`: a torch profiler trace of the engine core, written where the configuration says.

    {"steps": 50}  or  {"seconds": 2.5}   →   200 {"path": ..., "steps": 50, "seconds": 1.9}

Off unless the engine was started with a `profile_dir`. One at a time: 409 for others, whatever becomes of the
client that began it.
"""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from leadline.engine.server.http import ApiError, JSONBytes, read_body
from leadline.engine.server.state import ServerState
from leadline.protocol.openai.profile import ProfileRequest, ProfileResponse

__all__ = ["profile"]


async def profile(request: Request, state: ServerState) -> Response:
    body = await read_body(request, ProfileRequest, state.settings.max_body_bytes)
    engine = state.admit()
    if engine.profile_dir is None:
        raise ApiError(
            403,
            "profiling is off: start the engine with --profile-dir DIRECTORY, which is where traces go",
            type="permission_error",
            code="profiling_off",
        )
    answer = await engine.profile(steps=body.steps, seconds=body.seconds)
    if answer.code is not None:
        status = 409 if answer.code == "profile_running" else 500
        kind = "invalid_request_error" if status == 409 else "server_error"
        raise ApiError(status, answer.error, type=kind, code=answer.code)
    return JSONBytes(ProfileResponse(path=answer.path, steps=answer.steps, seconds=answer.seconds))
