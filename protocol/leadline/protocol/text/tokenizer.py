"""Text to token ids and back, from the tokenizer files of a model folder.

Owns reading `tokenizer.json` and its companions (`tokenizer_config.json`, `special_tokens_map.json`, chat
template files) and the map from a token id to the bytes it stands for. Uses the `tokenizers` library
directly: it is fast, it releases the GIL, and it spares the process the import of transformers.

Which special tokens surround a text is the post-processor's business in `tokenizer.json`; like transformers 5
we do not read `add_bos_token` and `add_eos_token` in `tokenizer_config.json` when there is a
`tokenizer.json`.

A `Tokenizer` is never changed after `load` and may be used from any number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from leadline.protocol.errors import ModelNotFound, RequestError, UnsupportedModel
from leadline.protocol.openai.service import TokenizerInfoResponse
from leadline.protocol.text.pieces import JoinKind, PieceTable

__all__ = ["NAMED_SPECIALS", "Tokenizer"]

_LONG_TEXT = 4096
"""Characters: about a millisecond of work."""

NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of one model. Build it with `Tokenizer.load`.

    Attributes:
        path: the model folder.
        vocab_size: highest token id plus one; the model's logits may be wider (padding).
        special_tokens: name → text, e.g. `{"bos_token": "<s>"}`: what chat templates may refer to.
        special_ids: ids that `skip_special_tokens` leaves out of the text.
        bos_token_id, eos_token_id, pad_token_id: None where the model has none.
        chat_templates: name → Jinja source; the usual one is called "default".
        pieces: id → bytes, and how pieces join to text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], templates: dict[str, str], path: Path
    ) -> None:
        self.path = path
        self.config = config
        self.chat_templates = templates
        self.special_tokens = _special_tokens(config)
        _add_missing_tokens(backend, config, self.special_tokens)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(
            backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.pieces = PieceTable(backend, self.vocab_size)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of the model folder `path`.

        Raises ModelNotFound when the folder holds no tokenizer, UnsupportedModel when it holds one that
        cannot be used without running code from the model's repository or without byte-exact decoding.
        """
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        for name, value in _read_json(folder / "special_tokens_map.json").items():
            config.setdefault(name, value)
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare Exception
                raise UnsupportedModel(
                    f"{file} cannot be read by tokenizers {tokenizers.__version__}: {error}"
                ) from error
        else:
            backend, config = _through_transformers(folder, config)
        return cls(backend, config, _read_templates(folder, config), folder)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object itself. Do not change it."""
        return self._backend

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or None."""
        return self.chat_templates.get("default")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own EOS; the model's config may name more (`ModelConfig.eos_token_ids`)."""
        return () if self.eos_token_id is None else (self.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text are recognised as such.

        The GIL is released for long texts, so that a thread takes them off the event loop. Raises
        RequestError for text that has no UTF-8 form (lone surrogates, which JSON's \\ud800 can produce), and
        for text at which the library gives up.
        """
        try:
            if len(text) > _LONG_TEXT:  # the library releases it for batches only
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise _unencodable([text], error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens around it. Raises as `encode`.

        Costs half of as many calls of `encode`, because it does not work out which characters each token
        covers. The GIL is released; call it from several threads to use several cores.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            raise _unencodable(texts, error) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        if self.pieces.kind is JoinKind.BYTE_LEVEL:
            # Not by the library, which takes letters of added tokens for bytes.
            skipped = self.special_ids if skip_special_tokens else ()
            data = b"".join([self.pieces.bytes_of(i) for i in token_ids if i not in skipped])
            return data.decode("utf-8", self.pieces.errors)
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for in running text (a leading space included); empty beyond the
        vocabulary."""
        return self.pieces.bytes_of(token_id)

    def token_str(self, token_id: int) -> str:
        """`token_bytes` as text, for display: a token that is part of a character shows U+FFFD."""
        return self.pieces.bytes_of(token_id).decode("utf-8", self.pieces.errors)

    def entry(self, token_id: int) -> str:
        """The token's entry in the vocabulary, such as `Ġthe`; empty beyond the vocabulary."""
        return self._backend.id_to_token(token_id) or ""

    def info(self) -> TokenizerInfoResponse:
        """Return what clients need that build prompts or count tokens themselves; the same from a tokenizer
        and from one made of its bundle."""
        added = sorted(self._backend.get_added_tokens_decoder().items())
        named = {name: text for name, text in self.special_tokens.items() if name in NAMED_SPECIALS}
        return TokenizerInfoResponse(
            **named,
            additional_special_tokens=[
                token.content for _, token in added if token.special and token.content not in named.values()
            ],
            added_tokens_decoder={token_id: token.content for token_id, token in added},
            vocab_size=self.vocab_size,
            chat_template=self.chat_template,
        )

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its vocabulary entry, or None."""
        return self._backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)


def _unencodable(texts: Sequence[object], error: BaseException) -> BaseException:
    """What to raise for a text that the library does not take. It says TypeError of half a surrogate pair
    too. Its panics are BaseException and come, for one, where two added tokens strip the same space."""
    if type(error).__name__ == "PanicException":
        return RequestError(f"the model's tokenizer cannot take this text: {error}")
    if not isinstance(error, UnicodeEncodeError | TypeError):
        return error
    if isinstance(error, TypeError) and all(map(_is_utf8, texts)):
        return error
    return RequestError(
        "text is not valid Unicode: it holds half of a surrogate pair, which has no UTF-8 form"
    )


def _is_utf8(text: object) -> bool:
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{file} must hold a JSON object")
    return value


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template files win over `chat_template` in tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif inline is not None:
        try:
            named = inline if isinstance(inline, dict) else {e["name"]: e["template"] for e in inline}
            if not all(isinstance(text, str) for pair in named.items() for text in pair):
                raise TypeError
        except (TypeError, KeyError):
            raise UnsupportedModel(
                "tokenizer_config.json: chat_template must be a text or a list of objects with name and "
                "template"
            ) from None
        templates.update(named)
    if (main := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(main)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(f"{file} is not text in UTF-8: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; each is text or `{"content": text, ...}` in the files."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **{n: config.get(n) for n in NAMED_SPECIALS}}
    result = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            result[name] = text
    return result


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], specials: dict[str, str]
) -> None:
    """Add tokens that tokenizer_config.json lists and tokenizer.json lacks (ids follow in order)."""
    missing: list[AddedToken] = []
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = _listed_tokens(config)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    names = [*specials.values()]
    if isinstance(extra, list):
        names += [str(entry.get("content", "")) if isinstance(entry, dict) else str(entry) for entry in extra]
    for entry in listed:
        if entry["content"] not in known:
            flags = {
                k: bool(entry[k])
                for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
                if k in entry
            }
            flags["special"] = flags.get("special", False) or entry["content"] in names
            missing.append(AddedToken(entry["content"], **flags))
            known.add(entry["content"])
    for name in names:
        if name and name not in known:
            missing.append(AddedToken(name, special=True, normalized=False))
            known.add(name)
    if missing:
        backend.add_tokens(missing)


def _listed_tokens(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of added_tokens_decoder in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        entries = [entry for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))]
        if all(isinstance(entry["content"], str) for entry in entries):
            return entries
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise UnsupportedModel(
        "tokenizer_config.json: added_tokens_decoder must map token ids to objects with a content"
    )


def _through_transformers(
    folder: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Let transformers convert an older tokenizer format, and take the `tokenizers` object it built."""
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedModel(
            f"{folder} holds no tokenizer.json, and converting an older format takes the package "
            "transformers, which is not installed here; convert it elsewhere with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`"
        ) from error

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, use_fast=True)
    except Exception as error:
        raise ModelNotFound(
            f"{folder} holds no tokenizer.json, and transformers found no tokenizer it can convert: {error}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel(
            f"the tokenizer of {folder} ({type(loaded).__name__}) has no tokenizer.json form; "
            "convert it with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`"
        )
    # transformers has added the listed tokens already; only names and templates are left to read.
    merged = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    for name in NAMED_SPECIALS:
        if (value := getattr(loaded, name, None)) is not None:
            merged[name] = str(value)
    if loaded.chat_template is not None:
        merged.setdefault("chat_template", loaded.chat_template)
    return tokenizers.Tokenizer.from_str(backend.to_str()), merged
