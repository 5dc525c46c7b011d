"""What crosses to other ranks: enough to build the same step, and no more than the step is worth."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.config import EngineConfig
from leadline.engine.core import build_scheduler
from leadline.engine.core.plan import NewSeq, StepPlan, StepResult, StepRow
from leadline.engine.messages import CoreRequest
from leadline.engine.runner.inputs import InputBuilder
from leadline.engine.runner.parallel.codec import PlanDecoder, PlanEncoder
from leadline.engine.runner.parallel.ring import (
    ACK,
    FRAMES,
    PlanReader,
    PlanWriter,
    frame_bytes,
    unnamed_file,
)
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
SIZE, CONTEXT = 16, 256
CONFIG = EngineConfig(
    model="any",
    block_size=SIZE,
    max_concurrent_requests=6,
    max_num_batched_tokens=50,
    prefill_chunk=23,
    speculative_ngram=3,
    speculative_match=1,
)
PENALTIES = [{}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"frequency_penalty": -1.0}]


def same_step(ours, theirs) -> None:
    assert ours.input_ids.tolist() == theirs.input_ids.tolist()
    assert ours.positions.tolist() == theirs.positions.tolist()
    assert ours.batch.slot_mapping.tolist() == theirs.batch.slot_mapping.tolist()
    assert ours.batch.block_tables.tolist() == theirs.batch.block_tables.tolist()
    assert ours.batch.context_lens.tolist() == theirs.batch.context_lens.tolist()
    assert ours.host_sample_slots.tolist() == theirs.host_sample_slots.tolist()
    assert ours.sample_positions.tolist() == theirs.sample_positions.tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(18, 60))
def test_a_worker_builds_the_same_steps_from_what_crosses(seed, num_blocks):
    """Plans of the real scheduler under random load: chunks, prefix hits, growth, preemption, resumption."""
    rng = random.Random(seed)
    scheduler = build_scheduler(CONFIG, num_blocks=num_blocks, max_model_len=CONTEXT, model="m", revision="r")
    leader, worker = SlotTables(6, CONTEXT // SIZE, CPU), SlotTables(6, CONTEXT // SIZE, CPU)
    encoder, decoder = PlanEncoder(leader), PlanDecoder(worker)
    vocabulary = rng.choice([3, 50_000])  # in the smaller one every sequence drafts
    shared = [rng.randrange(50_000) for _ in range(100)]
    for number in range(12):
        own = [rng.randrange(50_000) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 40), temperature=rng.random(), **PENALTIES[rng.randrange(4)]
        )
        prompt = shared[: rng.choice([0, 16, 37, 100])] + own
        request = CoreRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=params,
            seed=rng.getrandbits(63),
            arrival=0.0,
        )
        scheduler.add(request, 0.0)
    now = 0.0
    while scheduler.has_work():
        now += 1
        plan = scheduler.schedule(now)
        if plan is None:
            scheduler.take_outputs()
            continue
        if rng.random() < 0.2:
            plan.masks[plan.rows[0].slot] = np.array([rng.randrange(-(2**31), 2**31)], dtype=np.int32)
        copy = decoder.decode(encoder.encode(plan))
        assert (copy.step_id, copy.released, copy.grown, copy.rows) == (
            plan.step_id,
            plan.released,
            plan.grown,
            plan.rows,
        )
        assert {slot: mask.tolist() for slot, mask in copy.masks.items()} == {
            slot: mask.tolist() for slot, mask in plan.masks.items()
        }
        for ours, theirs in zip(plan.entered, copy.entered, strict=True):
            assert (ours.slot, ours.seq_id, ours.prompt_len, ours.seed, ours.block_ids, ours.sampling) == (
                theirs.slot,
                theirs.seq_id,
                theirs.prompt_len,
                theirs.seed,
                theirs.block_ids,
                theirs.sampling,
            )
            if ours.sampling.presence_penalty or ours.sampling.repetition_penalty != 1.0:
                assert list(theirs.token_ids) == ours.token_ids
        leader.apply(plan)
        worker.apply(copy)
        same_step(InputBuilder(leader, SIZE).build(plan), InputBuilder(worker, SIZE).build(copy))
        tokens = [rng.randrange(vocabulary) for _ in range(plan.num_samples)]
        scheduler.update(plan, StepResult(plan.step_id, tokens, [None] * len(tokens)), now)


def entering(count: int, cached: int, own: int, sampling: SamplingParams) -> StepPlan:
    """One step that admits `count` sequences with `cached` tokens in the cache and `own` to compute."""
    blocks = list(range(-(-(cached + own) // SIZE)))
    plan = StepPlan(0)
    for slot in range(count):
        tokens = list(range(1000, 1000 + cached + own))
        plan.entered.append(NewSeq(slot, slot, tokens, len(tokens), sampling, 2**63 + slot, blocks))
        plan.rows.append(StepRow(slot, cached, own, True))
    return plan


def test_512_requests_of_1000_cached_tokens_fit_one_frame():
    """E19: what crosses grows with the tokens of the step, not with those in the cache."""
    config = CONFIG.replace(max_concurrent_requests=512, max_num_batched_tokens=8192)
    tables = SlotTables(512, 2048 // SIZE, CPU)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, stop=("x" * 500,))
    data = PlanEncoder(tables).encode(entering(512, 992, 16, sampling))
    assert len(data) < 250_000 < frame_bytes(config, 2048) <= 1 << 20
    block_ids, query_tokens = 512 * 63 * 4, 512 * 16 * 4
    assert len(data) < block_ids + query_tokens + 512 * 130
    decode = StepPlan(1, rows=[StepRow(slot, 1008, 1, True) for slot in range(512)])
    tables.apply(entering(512, 992, 16, sampling))
    assert len(PlanEncoder(tables).encode(decode)) < 512 * 16 + 32


def test_a_prompt_that_penalties_count_crosses_whole_and_others_do_not():
    plain, counted = SamplingParams(), SamplingParams(repetition_penalty=1.1)
    tables = SlotTables(4, 2048 // SIZE, CPU)
    sizes = [len(PlanEncoder(tables).encode(entering(1, 1600, 16, params))) for params in (plain, counted)]
    assert sizes[0] < 700
    assert 1616 * 4 <= sizes[1] - sizes[0] < 1616 * 4 + 50


class Readers:
    """Two workers' ends of a ring, each in a thread that notes what it gets."""

    def __init__(self, frame_size: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.ours = [pair[0] for pair in pairs]
        self.got: list[list[bytes]] = [[], []]
        fd = unnamed_file()
        self.writer = PlanWriter(fd, frame_size, self.ours, self.await_ack)
        self.acks = 0
        self.threads = [
            threading.Thread(target=self.read, args=(index, PlanReader(fd, pairs[index][1])))
            for index in range(2)
        ]

    def await_ack(self, worker: int) -> None:
        assert self.ours[worker].recv(1) == ACK
        self.acks += 1

    def read(self, index: int, reader: PlanReader) -> None:
        self.got[index] = [bytes(data) for data in reader]

    def finish(self) -> None:
        for end in self.ours:
            end.shutdown(socket.SHUT_WR)
        for thread in self.threads:
            thread.join(20)


@pytest.mark.parametrize("lengths", [[10] * 50, [4088, 4089, 1, 100_000, 8176, 3], [500_000]])
def test_plans_of_any_length_reach_every_worker_in_order(lengths):
    readers = Readers(4096)
    rng = random.Random(1)
    plans = [rng.randbytes(length) for length in lengths]
    for thread in readers.threads:
        thread.start()
    for plan in plans:
        readers.writer.write(plan)
    readers.finish()
    assert readers.got == [plans, plans]


def test_the_leader_runs_ahead_of_sleeping_workers_by_the_ring_and_no_further():
    readers = Readers(4096)
    for number in range(FRAMES):
        readers.writer.write(bytes([number]))
    ahead = threading.Thread(target=readers.writer.write, args=(b"one more",))
    ahead.start()
    ahead.join(0.2)
    assert ahead.is_alive()
    for thread in readers.threads:
        thread.start()
    ahead.join(20)
    readers.finish()
    assert readers.acks == 2
    assert readers.got[0] == readers.got[1] == [*(bytes([n]) for n in range(FRAMES)), b"one more"]
