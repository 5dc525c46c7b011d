"""The prefix chain: pinned vectors, and the properties that make equal hashes mean equal prefixes."""

import hashlib
import struct
import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.protocol.chain import ChainNamespace, InvalidTokenId, chain, extend, short

PINNED = ChainNamespace(model="smollm2", revision="r1", adapter="", cache_salt="tenant", block_size=4)


def by_hand(namespace: ChainNamespace, tokens: list[int]) -> list[bytes]:
    """The definition of docs/architecture.md, written a second time and without the code under test."""
    ns = namespace
    fields = ["leadline-chain-1", ns.model, ns.revision, ns.adapter, ns.cache_salt, str(ns.block_size)]
    head = b"".join(struct.pack("<I", len(f.encode())) + f.encode() for f in fields)
    hashes = [hashlib.blake2b(head, digest_size=16).digest()]
    for i in range(len(tokens) // ns.block_size):
        block = tokens[i * ns.block_size : (i + 1) * ns.block_size]
        data = hashes[-1] + struct.pack(f"<{len(block)}I", *block)
        hashes.append(hashlib.blake2b(data, digest_size=16).digest())
    return hashes


text = st.text(max_size=8)
namespaces = st.builds(
    ChainNamespace,
    model=text,
    revision=text,
    adapter=text,
    cache_salt=text,
    block_size=st.integers(1, 5),
)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=24)


def test_the_hashes_of_a_known_sequence_never_change():
    assert PINNED.root().hex() == "5a702c76e04f1e331c663228765bca60"
    assert [h.hex() for h in chain(PINNED, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9])] == [
        "626067217961be2a4105c9ce5f7bc3ef",
        "e3779ab13bc1b37bc2ef7114a27d77af",
    ]


def test_the_default_block_size_is_64_tokens():
    namespace = ChainNamespace(model="m")
    assert namespace == ChainNamespace("m", "", "", "", 64)
    assert [len(chain(namespace, [0] * n)) for n in (63, 64, 127, 128)] == [0, 1, 1, 2]


@given(namespaces, token_lists)
def test_the_chain_agrees_with_its_definition(namespace, tokens):
    assert [namespace.root(), *chain(namespace, tokens)] == by_hand(namespace, tokens)


def test_the_short_hash_is_the_first_eight_bytes_read_big_endian():
    h = bytes.fromhex("0123456789abcdef0011223344556677")
    assert short(h) == 0x0123456789ABCDEF


@given(namespaces, namespaces)
def test_different_namespaces_have_different_roots(a, b):
    assert (a == b) == (a.root() == b.root())


@given(text, text, st.integers(0, 8))
def test_moving_characters_between_fields_changes_the_root(a, b, cut):
    joined = a + b
    moved = ChainNamespace(model=joined[:cut], revision=joined[cut:])
    assert (moved.root() == ChainNamespace(model=a, revision=b).root()) == (moved.model == a)


@pytest.mark.parametrize("field", ["model", "revision", "adapter", "cache_salt"])
def test_every_field_of_the_namespace_counts(field):
    assert ChainNamespace(**{"model": "m", field: "x"}).root() != ChainNamespace("m").root()


@given(namespaces, token_lists, token_lists)
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(namespace, head, tail):
    longer = chain(namespace, head + tail)
    shorter = chain(namespace, head)
    assert len(shorter) == len(head) // namespace.block_size
    assert longer[: len(shorter)] == shorter


@given(namespaces, token_lists, token_lists)
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(namespace, a, b):
    size = namespace.block_size
    for i, (x, y) in enumerate(zip(chain(namespace, a), chain(namespace, b), strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(namespaces, token_lists)
def test_extending_block_by_block_gives_the_chain(namespace, tokens):
    size = namespace.block_size
    parent, hashes = namespace.root(), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = extend(parent, tokens[start : start + size])
        hashes.append(parent)
    assert hashes == chain(namespace, tokens)


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda t: array("I", t),
        lambda t: array("q", t),
        lambda t: np.array(t, dtype=np.uint32),
        lambda t: np.array(t, dtype=">u4"),
        lambda t: np.array(t, dtype=np.int64),
        lambda t: np.repeat(np.array(t, dtype=np.uint32), 2)[::2],
    ],
    ids=["tuple", "array-I", "array-q", "uint32", "big-endian", "int64", "strided"],
)
def test_the_kind_of_sequence_makes_no_difference(convert):
    tokens = [0, 1, 2**31, 2**32 - 1, 7, 8, 9, 10]
    assert chain(PINNED, convert(tokens)) == chain(PINNED, tokens)
    assert extend(PINNED.root(), convert(tokens[:4])) == chain(PINNED, tokens)[0]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([0, -1, 0, 0], "position 1 is -1"),
        ([0, 0, 2**32, 0], "position 2 is 4294967296"),
        ([0, 0, 0, 1.5], "position 3 is 1.5"),
        (["a", 0, 0, 0], "position 0 is 'a'"),
        (b"abcd", "not bytes"),
        ("abcd", "not str"),
        (np.array([0, -5, 0, 0]), "position 1 is -5"),
        (np.array([[1, 2], [3, 4]]), "one dimension"),
        (np.array([0.5] * 4), "position 0 is 0.5"),
    ],
)
def test_a_token_id_outside_uint32_is_an_error_that_names_it(tokens, says):
    with pytest.raises(InvalidTokenId, match=says):
        chain(PINNED, tokens)
    with pytest.raises(InvalidTokenId, match=says):
        extend(PINNED.root(), tokens)


def test_a_parent_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError, match="16 bytes, not 8"):
        extend(b"8 bytes.", [1])


def test_a_block_size_of_zero_is_an_error():
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        ChainNamespace("m", block_size=0)


def test_a_salt_with_a_lone_surrogate_is_only_an_odd_salt():
    assert ChainNamespace("m", cache_salt="\ud800").root() != ChainNamespace("m", cache_salt="?").root()


def test_four_thousand_tokens_take_less_than_a_millisecond():
    tokens = list(range(4096))
    namespace = ChainNamespace("m")

    def once() -> float:
        start = time.perf_counter()
        chain(namespace, tokens)
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 1e-3
