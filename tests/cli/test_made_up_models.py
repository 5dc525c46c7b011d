"""The model folders of benchmarks/gpu_models.py: what their tokenizers promise to the benchmarks."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from leadline.gateway.tokens.segments import Segmenter
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
VOCABULARY = 12_000


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_models", ROOT / "benchmarks" / "gpu_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    models.write_tokenizer(folder, VOCABULARY, ["river", "stone"])
    return Tokenizer.load(folder)


def test_every_id_of_the_vocabulary_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCABULARY
    assert len(set(map(tokenizer.token_bytes, range(VOCABULARY)))) == VOCABULARY


def test_sampled_words_read_again_are_the_ids_that_were_sampled(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    answers = [[rng.randrange(256, VOCABULARY - 3) for _ in range(50)] for _ in range(20)]
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    messages: list[dict[str, object]] = []
    before: list[int] = []
    for answer in answers:
        messages.append({"role": "user", "content": "stone river stone"})
        prompt = tokenizer.encode(renderer.render(messages), add_special_tokens=False)
        assert prompt[: len(before)] == before
        before = prompt + answer
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


def test_a_given_word_is_one_token_and_other_text_is_bytes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" river stone", add_special_tokens=False)) == 2
    text = " été!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_gateway_may_cut_such_texts_between_words(tokenizer: Tokenizer) -> None:
    segmenter = Segmenter(tokenizer)
    assert segmenter.words
    assert segmenter.specials
