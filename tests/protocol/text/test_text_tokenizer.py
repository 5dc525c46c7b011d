"""`Tokenizer` agrees with transformers' AutoTokenizer, and says what is wrong with a folder it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from leadline.engine.errors import ModelNotFound, RequestError, UnsupportedModel
from leadline.protocol.text.pieces import JoinKind
from leadline.protocol.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "naïve café 東京 😀👩‍👩‍👧 Здравствуйте",
    "def f(x):\n\treturn x ** 2\n\n",
    "",
    "1234567890 3.14",
]


@pytest.fixture(scope="module")
def reference(smollm_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm_folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_it_encodes_as_transformers_does(tokenizer, reference, text, special):
    assert tokenizer.encode(text, special) == reference.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("skip", [True, False])
def test_it_decodes_as_transformers_does(tokenizer, reference, skip):
    for text in TEXTS:
        ids = [1, *tokenizer.encode(text), 2]
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_it_knows_the_same_special_tokens_as_transformers(tokenizer, reference):
    assert tokenizer.vocab_size == len(reference) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        reference.bos_token_id,
        reference.eos_token_id,
    )
    assert tokenizer.pad_token_id == reference.pad_token_id
    assert set(reference.all_special_ids) <= tokenizer.special_ids
    assert tokenizer.special_tokens == reference.special_tokens_map
    assert tokenizer.chat_template == reference.chat_template


def test_tokens_that_only_the_config_names_are_added(sentencepiece, sentencepiece_folder):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(sentencepiece_folder)
    for text in [*TEXTS, "a<|turn|>b</s>"]:
        for special in (True, False):
            assert sentencepiece.encode(text, special) == reference.encode(text, add_special_tokens=special)
    assert sentencepiece.encode("the fox")[0] == sentencepiece.bos_token_id
    assert sentencepiece.token_id("<|turn|>") in sentencepiece.special_ids
    assert sentencepiece.chat_template == reference.chat_template


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    known = b"".join(tokenizer.pieces.all_bytes())
    # SmolLM2's vocabulary lacks a few bytes (some control characters); encoding drops them.
    expected = bytes(byte for byte in text.encode() if byte in known)
    assert b"".join(map(tokenizer.token_bytes, ids)) == expected


def test_token_text_shows_spaces_and_marks_partial_characters(tokenizer, sentencepiece):
    assert [tokenizer.token_str(i) for i in tokenizer.encode(" Paris is")] == [" Paris", " is"]
    assert "\ufffd" in "".join(map(tokenizer.token_str, tokenizer.encode("🜚")))
    assert sentencepiece.token_str(sentencepiece.encode("the", False)[0]).startswith(" ")
    assert sentencepiece.token_bytes(sentencepiece.token_id("<0xE4>")) == b"\xe4"


def test_ids_beyond_the_vocabulary_are_no_text(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" == tokenizer.token_bytes(-1)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_half_a_surrogate_pair_is_the_callers_mistake(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_many_threads_may_use_one_tokenizer(tokenizer):
    texts = [f"{text} {i}" for i in range(40) for text in TEXTS]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone
        assert list(pool.map(tokenizer.decode, alone)) == [tokenizer.decode(ids) for ids in alone]


def test_a_template_file_wins_over_the_config(tmp_path, sentencepiece_folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((sentencepiece_folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.chat_templates == {"default": "from the file", "tool_use": "with tools"}


def test_a_list_of_named_templates_is_read(tmp_path, sentencepiece_folder):
    (tmp_path / "tokenizer.json").write_bytes((sentencepiece_folder / "tokenizer.json").read_bytes())
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path, smollm_folder, tokenizer):
    spec = json.loads((smollm_folder / "tokenizer.json").read_text())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    config["unk_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.encode("Hello world 😀") == tokenizer.encode("Hello world 😀")
    assert loaded.pieces.kind is JoinKind.BYTE_LEVEL


def test_a_folder_without_any_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelNotFound, match="not a folder"):
        Tokenizer.load(tmp_path / "nowhere")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", "x"),
        ("added_tokens_decoder", [{"content": "a"}]),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"1.5": {"content": "a"}}),
        ("added_tokens_decoder", {"5": {}}),
        ("added_tokens_decoder", {"5": "a"}),
        ("added_tokens_decoder", {"5": {"content": None}}),
        ("chat_template", [None]),
        ("chat_template", [{"name": "default"}]),
        ("chat_template", [{"name": "default", "template": 5}]),
        ("chat_template", {"default": 5}),
    ],
)
def test_a_field_of_another_shape_is_named(tmp_path, sentencepiece_folder, field, value):
    (tmp_path / "tokenizer.json").write_bytes((sentencepiece_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(UnsupportedModel, match=rf"tokenizer_config\.json: {field} must"):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path, sentencepiece_folder):
    (tmp_path / "tokenizer.json").write_bytes((sentencepiece_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(UnsupportedModel, match=r"chat_template\.jinja is not text in UTF-8"):
        Tokenizer.load(tmp_path)


def test_a_decoder_nobody_knows_is_opaque():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    loaded = Tokenizer(backend, {}, {}, Path())
    assert loaded.pieces.kind is JoinKind.OPAQUE
    assert loaded.eos_token_ids == ()


def test_loading_imports_neither_torch_nor_transformers(smollm_folder):
    code = (
        "import sys; from leadline.protocol.text.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]); "
        "from leadline.protocol.text import chat, prompts; "
        "from leadline.engine.frontend import output_processor, structured, tool_formats, validation; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(smollm_folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.strip() == "[]"
