"""Answers in plain ASCII text, for a service whose answers go to text messages or old terminals."""

from __future__ import annotations

from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.openai.chat import ChatCompletionRequest

__all__ = ["PlainText"]


class PlainText:
    """Constrains answers in text; requests with tools or with a form of their own stay as they are."""

    def constrain(self, request: ChatCompletionRequest) -> StructuredSpec | None:
        if request.tools or request.constraint is not None:
            return None
        return StructuredSpec("regex", r"[\x20-\x7e\n]{1,1600}")
