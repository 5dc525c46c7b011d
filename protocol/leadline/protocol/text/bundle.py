"""A model's tokenizer as one message: what a gateway that has no model files needs to tokenize as the engine.

Owns the message, its size limit and its digest. It is made from a loaded `Tokenizer`, so it holds what the
engine runs with, whatever files that came from; there are no file names in it, and nothing of it is code but
the chat templates, which run in the sandbox of chat.py. An engine serves it at `GET /admin/tokenizer` and
names its digest in every heartbeat.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import tokenizers
from msgspec import Meta

from leadline.protocol.errors import UnsupportedModel
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import NAMED_SPECIALS, Tokenizer
from leadline.protocol.wire import WireError, decode_msgpack

__all__ = ["FORMAT", "MAX_BUNDLE_BYTES", "TokenizerBundle", "bundle_digest", "encode_bundle", "load_bundle"]

FORMAT: Final = "leadline-tokenizer-1"
MAX_BUNDLE_BYTES = 64 << 20
"""The largest vocabularies in use take a third of it."""

ShortText = Annotated[str, Meta(max_length=4096)]


class TokenizerBundle(msgspec.Struct, kw_only=True, frozen=True):
    format: Literal["leadline-tokenizer-1"] = FORMAT
    tokenizer: bytes
    """The text of a tokenizer.json, with all added tokens in it."""
    special_tokens: Annotated[dict[ShortText, ShortText], Meta(max_length=1024)]
    """Name → text, as chat templates refer to them."""
    chat_templates: Annotated[dict[ShortText, Annotated[str, Meta(max_length=4 << 20)]], Meta(max_length=64)]
    """Name → Jinja source."""


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_bundles = msgspec.msgpack.Decoder(TokenizerBundle)


def encode_bundle(tokenizer: Tokenizer) -> bytes:
    """The bundle of a tokenizer, as msgpack; equal for equal tokenizers under one version of the library.

    Takes up to half a second. Raises UnsupportedModel for what cannot be written down, or is too large.
    """
    try:
        text = tokenizer.backend.to_str()
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModel(f"the tokenizer has no tokenizer.json form: {error}") from error
    data = _encoder.encode(
        TokenizerBundle(
            tokenizer=text.encode(),
            special_tokens=tokenizer.special_tokens,
            chat_templates=tokenizer.chat_templates,
        )
    )
    if len(data) > MAX_BUNDLE_BYTES:
        raise UnsupportedModel(
            f"the tokenizer takes {len(data)} bytes, more than the {MAX_BUNDLE_BYTES} that are passed on"
        )
    return data


def bundle_digest(data: bytes) -> str:
    """BLAKE2b-128 of an encoded bundle, 32 hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()


def load_bundle(data: bytes) -> tuple[Tokenizer, ChatRenderer]:
    """The tokenizer and the renderer in an encoded bundle; takes up to a second or two and blocks.

    Raises UnsupportedModel for bytes that are no such bundle, whatever they are.
    """
    try:
        bundle = decode_msgpack(_bundles, data, MAX_BUNDLE_BYTES)
    except WireError as error:
        raise UnsupportedModel(f"not a tokenizer bundle: {error}") from error
    specials = bundle.special_tokens
    config: dict[str, object] = {name: specials[name] for name in NAMED_SPECIALS if name in specials}
    config["extra_special_tokens"] = specials
    backend = _parsed(bundle.tokenizer)
    try:
        tokenizer = Tokenizer(backend, config, bundle.chat_templates, Path())
        return tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"not a tokenizer that this version can use: {error!r}") from error


def _parsed(text: bytes) -> tokenizers.Tokenizer:
    try:
        json.loads(text)  # says what is wrong, and where, better than what follows
        return tokenizers.Tokenizer.from_str(text.decode())
    except BaseException as error:
        # The library raises bare Exception; its panics are BaseException, and stop nothing but the parse.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UnsupportedModel(f"not a tokenizer that this version can read: {error}") from error
        raise
