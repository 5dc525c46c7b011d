"""Grammars in processes of their own: masks come back, bounds hold, no request waits for another's."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from leadline.engine.errors import RequestError, StructuredOutputFailed
from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.grammars.host import Bounds
from leadline.engine.grammars.pool import GrammarHosts, MaskOrError
from leadline.engine.sampling_params import StructuredSpec

EOS = 2
GOOD = StructuredSpec("regex", "a+")
MONSTER = StructuredSpec(
    "json_schema",
    json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}),
)
LEAD = "This is said first, and it is long enough for a trial of some tokens to end before the rest begins; "
LATE = StructuredSpec("regex", LEAD.replace(".", r"\.") + r"(.{0,2000}[a-z]{3}){1,40}[.,]")
"""Runs into a limit of the library, far behind its start."""


class Rig:
    """Hosts, and what has come of them so far."""

    def __init__(self, folder, **bounds: float) -> None:
        self.hosts = GrammarHosts(folder, 49152, [EOS], Bounds(**bounds))
        self.found: list[tuple[str, MaskOrError]] = []

    def open_good(self) -> None:
        """A request that is well behaved."""
        self.hosts.close("good")
        self.hosts.open("good", GOOD)
        assert isinstance(self.until("good"), np.ndarray)

    def until(self, *names: str) -> MaskOrError:
        """Wait for an answer to each of these requests; returns that of the last one."""
        ends = time.monotonic() + 120
        while not set(names) <= {name for name, _ in self.found}:
            assert time.monotonic() < ends, f"nothing for {names} but {self.found}"
            self.found += self.hosts.poll(0.05)
        answers = {name: answer for name, answer in self.found if name in names}
        self.found = [(name, answer) for name, answer in self.found if name not in names]
        return answers[names[-1]]

    def is_out_of_the_way(self, spec: StructuredSpec) -> bool:
        """Whether its host has the priority of slow ones, and not that of all."""
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        host = self.hosts._hosts[spec.kind, spec.value, spec.calls]
        nice = psutil.Process(host.pid).nice() if host.pid else ours + 4
        assert nice in (min(ours + 4, 19), min(ours + 10, 19))
        return nice == min(ours + 10, 19)

    def advance(self, name: str, *tokens: int) -> MaskOrError:
        self.hosts.advance(name, list(tokens))
        return self.until(name)


@pytest.fixture(scope="module")
def rig(smollm_folder) -> Iterator[Rig]:
    made = Rig(smollm_folder)
    yield made
    made.hosts.stop()


def test_masks_are_those_of_a_matcher_in_this_process(rig: Rig, tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    spec = StructuredSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    matcher, expected = compiler.matcher(spec), np.zeros(1536, dtype=np.int32)
    tokens = tokenizer.encode('{"a": 17}')
    rig.hosts.open("a", spec)
    mask = rig.until("a")
    for token in tokens:
        matcher.mask(expected)
        assert np.array_equal(mask, expected)
        matcher.accept(token)
        mask = rig.advance("a", token)
    rig.hosts.open("resumed", spec, tokens)
    assert np.array_equal(rig.until("resumed"), mask)
    rig.hosts.open("resumed wrongly", spec, [*tokens, tokens[0]])
    error = rig.until("resumed wrongly")
    assert isinstance(error, RequestError)
    assert (error.param, error.status) == ("resume_token_ids", 400)


def test_a_grammar_compiles_while_others_go_on_and_is_refused_alone(rig: Rig, tokenizer) -> None:
    letter = tokenizer.encode("a")[0]
    rig.open_good()
    rig.hosts.open("monster", MONSTER)
    for _ in range(20):
        assert isinstance(rig.advance("good", letter), np.ndarray)
    assert not rig.found, "the monster is still being compiled"
    assert not rig.is_out_of_the_way(GOOD)
    while not rig.is_out_of_the_way(MONSTER):
        rig.found += rig.hosts.poll(0.05)
    error = rig.until("monster")
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.param) == (400, "invalid_grammar", "response_format")
    assert isinstance(rig.advance("good", letter), np.ndarray)


@pytest.mark.parametrize(
    ("bounds", "words"), [({"compile_seconds": 0.3}, "0.3 s"), ({"memory_bytes": 4 << 20}, "4 MiB")]
)
def test_time_and_memory_of_a_compilation_are_bounded(smollm_folder, bounds, words) -> None:
    rig = Rig(smollm_folder, **bounds)
    rig.hosts.open("monster", MONSTER)
    error = rig.until("monster")
    assert isinstance(error, RequestError)
    assert error.code == "invalid_grammar"
    assert f"takes more than {words}" in error.message or f"or {words}" in error.message
    rig.hosts.stop()


def test_a_matcher_that_fails_in_the_middle_ends_its_request_and_is_not_used_again(
    rig: Rig, tokenizer
) -> None:
    letter = tokenizer.encode("a")[0]
    rig.open_good()
    for name in ("first", "again"):
        rig.hosts.open(name, LATE)
        answer = rig.until(name)
        assert isinstance(answer, np.ndarray), f"{name} is as good as the first"
        if name == "again":
            break
        out_of_the_way = False
        for token in tokenizer.encode(LEAD + "the cat sat on the mat and saw a dog " * 9):
            out_of_the_way = out_of_the_way or rig.is_out_of_the_way(LATE)
            answer = rig.advance(name, token)
            if isinstance(answer, RequestError):
                break
        assert isinstance(answer, StructuredOutputFailed)
        assert (answer.status, answer.code) == (500, "structured_output_failed")
        assert "too complex" in answer.message
        assert out_of_the_way, "its masks are slow"
    assert isinstance(rig.advance("good", letter), np.ndarray)


def test_a_host_that_dies_ends_those_that_follow_its_grammar_and_nobody_else(rig: Rig, tokenizer) -> None:
    letter = tokenizer.encode("a")[0]
    rig.hosts.open("other", StructuredSpec("regex", "a+"))
    rig.until("other")
    (nursery,) = [child for child in psutil.Process().children() if "grammars.host" in str(child.cmdline())]
    known = set(nursery.children())
    rig.hosts.open("bad", StructuredSpec("regex", "a+bad"))
    rig.hosts.open("worse", StructuredSpec("regex", "a+bad"))
    rig.until("bad", "worse")
    (bad,) = set(nursery.children()) - known
    os.kill(bad.pid, signal.SIGKILL)
    assert isinstance(rig.until("bad", "worse"), StructuredOutputFailed)
    assert isinstance(rig.advance("other", letter), np.ndarray)
    os.kill(nursery.pid, signal.SIGKILL)
    psutil.wait_procs([nursery], timeout=60)
    assert isinstance(rig.advance("other", letter), np.ndarray)
    rig.hosts.open("bad", StructuredSpec("regex", "a+bad"))
    assert isinstance(rig.until("bad"), np.ndarray), "a nursery that has died is replaced"


def test_a_client_with_one_grammar_does_not_wait_for_all_of_another(rig: Rig) -> None:
    for i in range(12):
        rig.hosts.open(f"many {i}", StructuredSpec("regex", f"a{{{i}}}b"), client="many")
    rig.hosts.open("one", StructuredSpec("regex", "c"), client="one")
    rig.until("one")
    assert len(rig.found) < 6
    rig.until(*(f"many {i}" for i in range(12)))


def test_a_compilation_that_nobody_waits_for_ends(rig: Rig) -> None:
    rig.open_good()
    known = set(psutil.Process().children(recursive=True))
    rig.hosts.open("monster", MONSTER)
    rig.hosts.open("small", StructuredSpec("regex", "b"))
    rig.until("small")  # the monster has said by now that it is there
    new = set(psutil.Process().children(recursive=True)) - known
    assert len(new) == 2
    rig.hosts.close("monster")
    gone, _ = psutil.wait_procs(new, timeout=1)
    assert len(gone) == 1
    rig.hosts.open("smaller", StructuredSpec("regex", "b"))
    assert isinstance(rig.until("smaller"), np.ndarray)
    assert rig.hosts.num_queued == 0


def test_a_grammar_that_nobody_asks_for_any_more_gives_its_memory_back(rig: Rig) -> None:
    spec = StructuredSpec("regex", "once and never again")
    rig.hosts.open("once", spec)
    rig.until("once")
    process = psutil.Process(rig.hosts._hosts[spec.kind, spec.value, spec.calls].pid)
    rig.hosts.end_idle(0)
    assert process.is_running(), "a request follows it"
    rig.hosts.close("once")
    rig.hosts.end_idle()
    assert process.is_running(), "the next turn may ask for it"
    rig.hosts.end_idle(0)
    assert psutil.wait_procs([process], timeout=10)[0] == [process]
    rig.hosts.open("again", spec)
    assert isinstance(rig.until("again"), np.ndarray)


def test_nothing_is_left_when_the_owner_stops(smollm_folder) -> None:
    before = set(psutil.Process().children(recursive=True))
    rig = Rig(smollm_folder)
    rig.hosts.open("a", StructuredSpec("regex", "a+"))
    rig.until("a")
    left = set(psutil.Process().children(recursive=True)) - before
    assert len(left) == 2
    rig.hosts.stop()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
