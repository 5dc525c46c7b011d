"""The state that the parts of the scheduler share, and the moves between the states of a sequence.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
       ▲                  │ preempt
       │   unread == 0    ▼
       └───────────── DRAINING          (straight to WAITING if nothing is unread)

Every move that takes a slot or blocks, or gives them back, is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from leadline.engine.core.block_pool import BlockPool
from leadline.engine.core.policy import SchedulingPolicy
from leadline.engine.core.sequence import NEVER, Sequence, State
from leadline.engine.core.settings import SchedulerConfig
from leadline.engine.messages import CoreOutput, FinishReason
from leadline.protocol.chain import extend

__all__ = ["PrefixDedup", "SchedulerState"]


class PrefixDedup:
    """Prefixes that are being computed, and the sequences that wait for them instead of computing them again.

    A running sequence *owns* the hashes of the prompt blocks it has yet to compute. Another sequence whose
    next missing block is owned is parked on it: out of the policy's queue, so that it blocks no other, and
    back in the queue (by `wake`) as soon as the block is indexed or the owner is gone.

        owner     | computed | owned: h4 h5 h6 h7 |
        waiter    |  hits    | needs: h4 h5 h6 h9 |     parked on h6, the last block it shares with the owner
    """

    def __init__(self, wake: Callable[[Sequence], None]) -> None:
        self._wake = wake
        self._owner: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, dict[Sequence, None]] = {}
        self.num_parked = 0

    def own(self, seq: Sequence, first: int, end: int) -> None:
        """`seq` is going to compute blocks first .. end - 1; what another one owns stays with that one."""
        for position in range(first, end):
            self._owner.setdefault(seq.hashes[position], seq)

    def computed(self, block_hash: bytes) -> None:
        """The block is indexed: drop its owner, and let the sequences that waited for it go on."""
        if self._owner.pop(block_hash, None) is not None:
            self._release(block_hash)

    def disown(self, seq: Sequence, first: int, end: int) -> None:
        """`seq` will not compute blocks first .. end - 1 after all."""
        for position in range(first, end):
            block_hash = seq.hashes[position]
            if self._owner.get(block_hash) is seq:
                del self._owner[block_hash]
                self._release(block_hash)

    def park(self, seq: Sequence, first: int, end: int) -> bool:
        """Park `seq`, whose first missing block is `first`, if that is owned; blocks from `end` on are of no
        use to it.

        False if it is not owned.
        """
        if first >= end:
            return False
        hashes = seq.hashes
        owner = self._owner.get(hashes[first])
        if owner is None:
            return False
        last = first
        while last + 1 < end and self._owner.get(hashes[last + 1]) is owner:
            last += 1
        seq.waiting_for = hashes[last]
        self._parked.setdefault(hashes[last], {})[seq] = None
        self.num_parked += 1
        return True

    def unpark(self, seq: Sequence) -> None:
        """`seq`, which is parked, leaves for another reason (abort, timeout)."""
        assert seq.waiting_for is not None
        waiters = self._parked[seq.waiting_for]
        del waiters[seq]
        if not waiters:
            del self._parked[seq.waiting_for]
        seq.waiting_for = None
        self.num_parked -= 1

    def _release(self, block_hash: bytes) -> None:
        for seq in self._parked.pop(block_hash, ()):
            seq.waiting_for = None
            self.num_parked -= 1
            self._wake(seq)

    @property
    def is_idle(self) -> bool:
        """Whether no hash is owned and no sequence parked: true whenever no sequence is being prefilled."""
        return not self._owner and not self._parked and not self.num_parked


class SchedulerState:
    """The scheduler's state.

    Dicts keyed by sequence serve as ordered sets: removal is O(1), order is insertion.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, policy: SchedulingPolicy) -> None:
        self.config = config
        self.pool = pool
        self.policy = policy
        self.dedup = PrefixDedup(self.queue)
        self.live: dict[str, Sequence] = {}
        """By request id: everything not finished."""
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        """Running sequences are in exactly one of these two."""
        self.draining: dict[Sequence, None] = {}
        self.guided: dict[Sequence, None] = {}
        """Running sequences that may need masks."""
        self.free_slots = list(range(config.max_concurrent_requests - 1, -1, -1))
        self.released: list[int] = []
        """Slots given back since the last plan."""
        self.early_outputs: list[CoreOutput] = []
        """Final outputs that no step result brings: aborts, timeouts."""
        self.num_waiting = 0
        self.num_preemptions = 0

    # -- waiting ---------------------------------------------------------------------------------------------

    def queue(self, seq: Sequence) -> None:
        """Put a sequence that is in no queue (new, drained, woken) into the policy's."""
        if seq.state is not State.WAITING or seq.waiting_for is not None:
            raise RuntimeError(f"sequence {seq.request_id} cannot be queued while {seq.state.value}")
        self.policy.enqueue(seq)

    def start_waiting(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        self.num_waiting += 1
        if not seq.held:
            self.queue(seq)

    def _stop_waiting(self, seq: Sequence) -> None:
        self.num_waiting -= 1
        if seq.held:
            seq.held = False
        elif seq.waiting_for is not None:
            self.dedup.unpark(seq)
        else:
            self.policy.withdraw(seq)

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, blocks: list[int], num_hit: int) -> None:
        """Run `seq` with this block table, already referenced; its first num_hit blocks are prefix hits."""
        block_size = self.config.block_size
        self._stop_waiting(seq)
        seq.state = State.RUNNING
        seq.slot = self.free_slots.pop()
        seq.blocks = blocks
        seq.capacity = len(blocks) * block_size
        seq.computed = num_hit * block_size
        seq.committed = num_hit
        seq.commit_at = (num_hit + 1) * block_size if self.config.prefix_caching else NEVER
        self.prefilling[seq] = None
        if seq.structured or seq.thought is not None:
            self.guided[seq] = None

    def commit(self, seq: Sequence, limit: int) -> None:
        """Offer the full blocks of the first `limit` tokens, known and computed by plans so far, to the
        index."""
        block_size = self.config.block_size
        end = limit // block_size
        self.extend_hashes(seq, end)
        for position in range(seq.committed, end):
            block_hash = seq.hashes[position]
            self.pool.commit(seq.blocks[position], block_hash)
            self.dedup.computed(block_hash)
        seq.committed = end
        seq.commit_at = (end + 1) * block_size

    def extend_hashes(self, seq: Sequence, count: int) -> None:
        """Hash known tokens until `count` blocks have a hash."""
        block_size, hashes = self.config.block_size, seq.hashes
        parent = hashes[-1] if hashes else seq.root
        for position in range(len(hashes), count):
            parent = extend(parent, seq.token_ids[position * block_size : (position + 1) * block_size])
            hashes.append(parent)

    def _stop_running(self, seq: Sequence) -> None:
        """Give back slot, blocks and owned hashes."""
        if seq in self.prefilling:
            del self.prefilling[seq]
            if self.config.prefix_caching:
                self.dedup.disown(seq, seq.committed, len(seq.hashes))
        else:
            del self.decoding[seq]
        self.guided.pop(seq, None)
        self.pool.release(seq.blocks)
        self.released.append(seq.slot)
        self.free_slots.append(seq.slot)
        seq.slot = -1
        seq.blocks = []
        seq.capacity = seq.computed = seq.committed = 0
        seq.commit_at = NEVER

    def preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence but its tokens; it is computed again later."""
        if seq in self.prefilling:
            # Its prompt logprobs so far would be reported twice; once the whole prompt is planned all arrive.
            seq.attempt += 1
            seq.prompt_logprobs.clear()
        self._stop_running(seq)
        seq.preemptions += 1
        self.num_preemptions += 1
        if seq.unread:
            seq.state = State.DRAINING
            self.draining[seq] = None
        else:
            self.start_waiting(seq)

    def drained(self, seq: Sequence) -> None:
        """The last unread token of a preempted sequence was read: it can queue."""
        del self.draining[seq]
        self.start_waiting(seq)

    # -- the end ---------------------------------------------------------------------------------------------

    def finish(self, seq: Sequence) -> None:
        """`seq` ends, in whatever state it is; rows of it that are still in flight will be ignored."""
        if seq.state is State.RUNNING:
            self._stop_running(seq)
        elif seq.state is State.DRAINING:
            del self.draining[seq]
        else:
            self._stop_waiting(seq)
        seq.state = State.FINISHED
        seq.finished = True
        del self.live[seq.request_id]

    def finish_early(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq` without a step result: its final output goes to the early_outputs."""
        self.finish(seq)
        output = CoreOutput(request_id=seq.request_id, finish_reason=reason)
        self.describe(seq, output)
        self.early_outputs.append(output)

    def describe(self, seq: Sequence, output: CoreOutput) -> None:
        """Fill in what first and final outputs carry about the request."""
        if not seq.answered and seq.admitted_at is not None:
            output.queue_seconds = max(0.0, seq.admitted_at - seq.request.arrival)
        seq.answered = True
        output.num_cached_tokens = seq.cached_tokens
        output.num_preemptions = seq.preemptions
