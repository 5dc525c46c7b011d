"""Whole prompts of short chats, known by what the template is given: nothing is rendered or hashed twice.

Room: gateway/tokens. Rendering a template costs more than all else that the gateway does for a small request,
and small requests repeat: probes, evaluations, the same first turn of an assistant. A prompt is a function of
messages, tools, template options and the namespace of its chain; their JSON is the key, so a hit is exact.
Long conversations are not kept here: their next turn is another one, and segments serve it better.

Templates that read the clock (`strftime_now`) have prompts that change by themselves: nothing is kept then.
"""

from typing import Generic, TypeVar

import msgspec

from leadline.gateway.tokens.lru import ByteLRU
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import tools_shown

__all__ = ["PromptMemo"]

V = TypeVar("V")

_LONGEST_KEY = 8192
"""Bytes of JSON: some 2,000 tokens."""
_MOST_MESSAGES = 16
_ENTRY_BYTES = 600
_encode = msgspec.json.Encoder().encode


class PromptMemo(Generic[V]):
    """(chat, root of the chain) → prompt. Not safe for threads."""

    def __init__(self, renderer: ChatRenderer, max_bytes: int) -> None:
        self._known: ByteLRU[bytes, V] = ByteLRU(max_bytes)
        self._timeless = not any("strftime_now" in source for source in renderer.sources.values())

    @property
    def used_bytes(self) -> int:
        return self._known.used_bytes

    def key(self, request: ChatCompletionRequest, root: bytes) -> bytes | None:
        """What the prompt is a function of; None for what is no short chat."""
        if len(request.messages) > _MOST_MESSAGES or request.resume_token_ids:
            return None
        try:
            key = _encode(
                (
                    request.messages,
                    tools_shown(request.tools, request.tool_choice),
                    request.add_generation_prompt,
                    request.continue_final_message,
                    request.chat_template_kwargs,
                    root,
                )
            )
        except UnicodeEncodeError:  # half a surrogate pair
            return None
        return key if len(key) <= _LONGEST_KEY else None

    def get(self, key: bytes) -> V | None:
        return self._known.get(key)

    def put(self, key: bytes, prompt: V, cost: int) -> None:
        """`cost`: bytes that the prompt takes."""
        if self._timeless:
            self._known.put(key, prompt, len(key) + cost + _ENTRY_BYTES)
