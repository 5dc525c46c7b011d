"""Body and answer of `POST /admin/profile`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["ProfileRequest", "ProfileResponse"]


class ProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How long to record: either so many steps or so many seconds. Nothing else is the caller's to say."""

    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Steps of the engine core; recording ends after 60 seconds even if it makes fewer."""
    seconds: Annotated[float, Meta(gt=0, le=60)] | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("Expected either `steps` or `seconds` - at `$.steps`")


class ProfileResponse(msgspec.Struct, kw_only=True):
    path: str
    """The trace file, on the engine's machine."""
    steps: int
    """Steps recorded."""
    seconds: float
