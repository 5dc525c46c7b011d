"""Guesses about what pods will hold."""

from hypothesis import given
from hypothesis import strategies as st

from leadline.gateway.index.speculative import SpeculativeIndex


def test_a_guess_is_matched_until_it_expires() -> None:
    guesses = SpeculativeIndex(ttl=5)
    guesses.add("a", [1, 2, 3], now=100)
    assert guesses.match([1, 2, 3, 4], now=104.9) == {"a": 3}
    assert guesses.match([1, 2], now=104.9) == {"a": 2}
    assert guesses.match([7, 8], now=104.9) == {}
    assert guesses.match([1, 2, 3, 4], now=105) == {}
    guesses.expire(105)
    assert len(guesses) == 0


def test_a_later_request_prolongs_the_guess() -> None:
    guesses = SpeculativeIndex(ttl=5)
    guesses.add("a", [1, 2], now=0)
    guesses.add("a", [2, 3], now=3)
    guesses.expire(6)
    assert guesses.match([1, 2, 3], now=6) == {"a": 3}
    assert len(guesses) == 2


def test_only_the_unheld_tail_need_be_added() -> None:
    guesses = SpeculativeIndex()
    guesses.add("a", [11, 12], now=0)
    assert guesses.match([10, 11, 12, 13], now=1) == {"a": 3}


def test_the_real_event_ends_the_guess_and_leaves_deeper_ones() -> None:
    guesses = SpeculativeIndex()
    guesses.add("a", [1, 2, 3], now=0)
    guesses.add("b", [1], now=0)
    guesses.settle("a", [1, 2])
    assert guesses.match([1, 2, 3], now=1) == {"a": 3, "b": 1}
    guesses.settle("a", [3])
    assert guesses.match([1, 2, 3], now=1) == {"b": 1}
    assert len(guesses) == 1


def test_dropping_a_pod_ends_only_its_guesses() -> None:
    guesses = SpeculativeIndex()
    guesses.add("a", [1, 2], now=0)
    guesses.add("b", [1], now=0)
    guesses.drop("a")
    assert guesses.match([1, 2], now=1) == {"b": 1}


def test_the_oldest_guesses_make_room() -> None:
    guesses = SpeculativeIndex(max_entries=10)
    for number in range(20):
        guesses.add("a", [number * 2, number * 2 + 1], now=number * 0.01)
    assert len(guesses) == 10
    assert guesses.match([0, 1], now=1) == {}
    assert guesses.match([38, 39], now=1) == {"a": 2}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "settle", "drop", "expire"]),
            st.sampled_from(["a", "b"]),
            st.lists(st.integers(0, 9), max_size=5),
            st.floats(0, 3),
        ),
        max_size=30,
    )
)
def test_guesses_equal_a_plain_map_from_block_and_pod_to_expiry(operations: list[tuple]) -> None:
    guesses, model, now = SpeculativeIndex(ttl=4), dict[tuple[int, str], float](), 0.0
    for kind, pod, blocks, wait in operations:
        now += wait
        if kind == "add":
            guesses.add(pod, blocks, now)
            model.update({(block, pod): now + 4 for block in blocks})
        elif kind == "settle":
            guesses.settle(pod, blocks)
            for block in blocks:
                model.pop((block, pod), None)
        elif kind == "drop":
            guesses.drop(pod)
            model = {key: until for key, until in model.items() if key[1] != pod}
        guesses.expire(now)
        model = {key: until for key, until in model.items() if until > now}
        assert len(guesses) == len(model)
        for block in range(10):
            expected = {owner: 1 for held, owner in model if held == block}
            assert guesses.match([block], now) == expected
    guesses.expire(now + 4)
    assert len(guesses) == 0
    assert not guesses._guesses
    assert not guesses._expiry
