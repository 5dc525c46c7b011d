"""What an API process needs of a model folder: everything that turns text into tokens and back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.config import ModelConfig, load_model_config
from leadline.protocol.text.bundle import encode_bundle
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ModelTexts"]

logger = logging.getLogger("leadline.engine")


@dataclass(slots=True)
class ModelTexts:
    tokenizer: Tokenizer
    renderer: ChatRenderer
    model_config: ModelConfig
    bundle: bytes
    """The tokenizer for gateways; empty where it cannot be had in that form."""

    @classmethod
    def load(cls, path: str) -> ModelTexts:
        tokenizer = Tokenizer.load(path)
        _ = tokenizer.pieces.longest  # computed over the whole vocabulary on first use: not in a request
        renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
        return cls(tokenizer, renderer, load_model_config(path), _bundle_of(tokenizer))


def _bundle_of(tokenizer: Tokenizer) -> bytes:
    try:
        return encode_bundle(tokenizer)
    except UnsupportedModel as error:
        logger.warning("gateways without model files will match by text: %s", error)
        return b""
