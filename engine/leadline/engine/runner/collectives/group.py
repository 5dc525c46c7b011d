"""The collectives of a tensor-parallel group: gloo on CPU, NCCL on CUDA, behind the same four methods.

The backends are used without torch.distributed's default process group, so that two engines of one process,
or a caller's own distributed code, do not disturb each other. Ranks meet through an unnamed file they
inherited.
"""

from __future__ import annotations

import os
import threading
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceOp

from leadline.engine.errors import ConfigError
from leadline.engine.models.parallel import Fabric

__all__ = ["RankGroup", "device_of", "ranks_share_a_gpu"]

c10d: Any = torch._C._distributed_c10d
_SHARED = "LEADLINE_TP_SHARE_GPU"
_TIMEOUT = timedelta(minutes=30)
"""How long ranks may be apart while they load. Death is noticed at once, a hang in a step soon, by other
means (ranks.py)."""


def ranks_share_a_gpu() -> bool:
    """For tests: any number of ranks on a machine with one GPU. They take turns at it, so a sum takes
    milliseconds."""
    return os.environ.get(_SHARED, "0") not in ("", "0")


def device_of(rank: int) -> torch.device:
    """The GPU of a rank."""
    return torch.device("cuda", 0 if ranks_share_a_gpu() else rank)


class RankGroup:
    """Rank `rank` of `size`, on `device`. Construction waits for all ranks."""

    def __init__(self, meeting_fd: int, rank: int, size: int, device: torch.device) -> None:
        """`meeting_fd`: the file all ranks share, see `ring.unnamed_file`. The caller may close it."""
        self.rank, self.size, self.device = rank, size, device
        self.fabric: Fabric | None = None
        """Set by `fabric.make_collectives`."""
        self.aborted = False
        self._aborting, self._ended = threading.Lock(), threading.Event()
        self._meeting = _Meeting(meeting_fd, rank, size, device)
        self._sum, self._least, self._gather = AllreduceOptions(), AllreduceOptions(), AllgatherOptions()
        self._least.reduceOp = ReduceOp.MIN
        for options in (self._sum, self._least, self._gather):
            # On CUDA: run on the current stream, as a graph needs it.
            options.asyncOp = False
        # Connections and NCCL's buffers come into being here, before memory is measured.
        self.least(0)
        self.all_gather(torch.zeros((1, 1), device=device))

    def symmetric_memory(self, size: int) -> tuple[torch.Tensor, list[int]]:
        """Allocate `size` bytes on each rank's GPU that all ranks can address. Returns this rank's as uint8,
        and the address at which this rank sees those of each rank."""
        return self._meeting.symmetric_memory(size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same bits on every rank."""
        _finish(self._meeting.backend.allreduce([x], self._sum))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[R, n] of each rank → [R, size * n], ranks side by side in order."""
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        _finish(self._meeting.backend._allgather_base(parts, x.contiguous(), self._gather))
        if rows == 1:
            return parts.view(1, -1)
        return parts.view(self.size, rows, width).transpose(0, 1).reshape(rows, -1)

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks. Waits for the device."""
        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        _finish(self._meeting.backend.allreduce([number], self._least))
        return int(number.item())

    def abort(self, wait_seconds: float = 0.0) -> None:
        """Make collectives that wait for a dead rank return, from any thread; then give NCCL's memory back,
        within `wait_seconds` or later.

        NCCL's abort returns only when no CUDA graph holds its kernels any more: it has a thread of its own.
        Gloo's collectives need no help: they fail when a connection closes.
        """
        with self._aborting:
            first, self.aborted = not self.aborted, True
        if first and self.fabric is not None:
            self.fabric.abort()
        if self.device.type != "cuda":
            return
        if first:
            threading.Thread(target=self._abort_nccl, daemon=True, name="nccl-abort").start()
        self._ended.wait(wait_seconds)

    def _abort_nccl(self) -> None:
        try:
            self._meeting.backend.abort()
        finally:
            self._ended.set()


class _Meeting:
    """The backend, and the file its store looks up by path until its destructor is through: a descriptor
    closed earlier would let it find another file under the same number."""

    def __init__(self, fd: int, rank: int, size: int, device: torch.device) -> None:
        self.fd = os.dup(fd)
        self.rank, self.size, self.device = rank, size, device
        self.store: Any = dist.FileStore(f"/proc/self/fd/{self.fd}", size)
        make = _gloo if device.type == "cpu" else _nccl
        self.backend: Any = make(self.store, rank, size)
        self._exchanges: Any = None
        self._group: Any = None
        self._name = ""
        self._handles: list[Any] = []

    def symmetric_memory(self, size: int) -> tuple[torch.Tensor, list[int]]:
        # We use no multicast, and setting it up can be forbidden where peer access is not.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if ranks_share_a_gpu():
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._register()
        symmetric = c10d._SymmetricMemory
        memory = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, self.device, self._name)
        handle = symmetric.rendezvous(memory, self._name)
        self._handles.append(handle)
        return memory, list(handle.buffer_ptrs)

    def _register(self) -> None:
        """Symmetric memory finds the store by the name of a group; which table it looks into depends on
        torch's version."""
        if self._group is not None:
            return
        if self.rank == 0:
            self.store.set("leadline/name", f"leadline-{uuid.uuid4().hex}")
        self._name = self.store.get("leadline/name").decode()
        self._exchanges = store = _Renumbered(self.store)
        self._group = c10d.ProcessGroup(store, self.rank, self.size)
        self._group._set_group_name(self._name)
        c10d._register_process_group(self._name, self._group)
        c10d._SymmetricMemory.set_group_info(self._name, self.rank, self.size, store)

    def __del__(self) -> None:
        if self._group is not None:
            c10d._unregister_process_group(self._name)
        self._group = self._exchanges = self.backend = self.store = None
        os.close(self.fd)


class _Renumbered(dist.Store):
    """A view of a store for symmetric memory, whose keys end in /EXCHANGE/RANK. Exchanges are counted from
    the start of the process: of two engines in one process, the second's workers would count otherwise.

    Keep a reference: what torch holds of it is not the part that is written in Python.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._exchanges: dict[str, int] = {}

    def _key(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        return f"symmetric/{self._exchanges.setdefault(exchange, len(self._exchanges))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._store.wait([self._key(key) for key in keys], timeout)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _gloo(store: Any, rank: int, size: int) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return backend(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("tensor_parallel on CUDA needs a torch built with NCCL")
    if ranks_share_a_gpu():
        # NCCL refuses a GPU twice on one host: these are ranks of different hosts, and talk through sockets.
        os.environ["NCCL_HOSTID"] = f"leadline-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Its own watchdogs end the process when a rank is late; ours raise an error that says which.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)
