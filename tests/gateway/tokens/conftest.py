"""Tokenizers of the families that models use: SmolLM2's own, and others built from its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.protocol.text.tokenizer import Tokenizer
from real_tokenizers import sentencepiece, sentencepiece_folder, smollm_folder, tokenizer

__all__ = ["sentencepiece", "sentencepiece_folder", "smollm_folder", "tokenizer"]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
LLAMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim }}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}"""
QWEN_TEMPLATE = """{%- if tools %}
{{- "<|im_start|>system\\n# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" ~ (tool | tojson) }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- "\\n<tool_call>\\n" ~ (call.function | tojson) ~ "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}
{%- endif %}"""


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **plain, **flags}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


Change = Callable[[dict[str, Any]], None]


def variant(source: Path, folder: Path, change: Change, config: dict[str, Any]) -> Path:
    """SmolLM2's tokenizer.json with `change` applied."""
    spec = json.loads((source / "tokenizer.json").read_text())
    change(spec)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _add(spec: dict[str, Any], tokens: list[tuple[str, dict[str, bool]]]) -> dict[str, int]:
    ids = {}
    for offset, (content, flags) in enumerate(tokens):
        ids[content] = 49152 + offset
        spec["added_tokens"].append(added(49152 + offset, content, **flags))
    return ids


@pytest.fixture(scope="session")
def llama3_folder(smollm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

    def change(spec: dict[str, Any]) -> None:
        ids = _add(spec, [(name, {"special": True}) for name in names])
        spec["pre_tokenizer"] = split(LLAMA3_PATTERN)
        bos = {"id": names[0], "ids": [ids[names[0]]], "tokens": [names[0]]}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": names[0], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {names[0]: bos},
        }

    config = {"bos_token": names[0], "eos_token": names[3], "chat_template": LLAMA3_TEMPLATE}
    return variant(smollm_folder, tmp_path_factory.mktemp("tokens") / "llama3", change, config)


@pytest.fixture(scope="session")
def qwen_folder(smollm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokens that are matched in the text but are not special, and a normalizer."""

    def change(spec: dict[str, Any]) -> None:
        _add(spec, [(name, {}) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
        spec["normalizer"] = {"type": "NFC"}
        spec["pre_tokenizer"] = split(QWEN_PATTERN)

    config = {"eos_token": "<|im_end|>", "chat_template": QWEN_TEMPLATE}
    return variant(smollm_folder, tmp_path_factory.mktemp("tokens") / "qwen", change, config)


@pytest.fixture(scope="session")
def awkward_folder(smollm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Added tokens that strip, stand alone, overlap, begin with a letter, or hold a space between letters."""

    def change(spec: dict[str, Any]) -> None:
        _add(
            spec,
            [
                ("<l>", {"lstrip": True}),
                ("<r>", {"rstrip": True}),
                ("<w>", {"single_word": True}),
                ("word", {"single_word": True}),
                ("<<|", {}),
                ("<|im_start|>user", {}),
                ("a b", {"normalized": True}),
                ("  ", {"normalized": True}),
            ],
        )

    return variant(smollm_folder, tmp_path_factory.mktemp("tokens") / "awkward", change, {})


@pytest.fixture(scope="session")
def metaspace_folder(sentencepiece_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dummy space in front of the text's first word only, and none of a later stretch."""
    spec = json.loads((sentencepiece_folder / "tokenizer.json").read_text())
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": True,
    }
    folder = tmp_path_factory.mktemp("tokens") / "metaspace"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = (sentencepiece_folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return folder


FAMILIES = ("smollm", "llama3", "qwen", "sentencepiece", "metaspace", "awkward")


@pytest.fixture(scope="session")
def tokenizers_by_family(
    smollm_folder: Path,
    llama3_folder: Path,
    qwen_folder: Path,
    sentencepiece_folder: Path,
    metaspace_folder: Path,
    awkward_folder: Path,
) -> dict[str, Tokenizer]:
    folders = (
        smollm_folder,
        llama3_folder,
        qwen_folder,
        sentencepiece_folder,
        metaspace_folder,
        awkward_folder,
    )
    return {family: Tokenizer.load(folder) for family, folder in zip(FAMILIES, folders, strict=True)}


@pytest.fixture(scope="session", params=FAMILIES)
def any_tokenizer(request: pytest.FixtureRequest, tokenizers_by_family: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_family[request.param]
