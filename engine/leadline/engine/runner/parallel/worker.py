"""A worker's main: `python -m leadline.engine.runner.parallel.worker RANK SOCKET MEETING PLANS`.

Started by `ranks.Ranks` with three inherited descriptors: the socket to the leader, the file in which ranks
meet, and the memory of the plans. It builds the same runner as the leader over its own shard, and runs every
plan it is sent. It ends when the leader closes the socket; and at once, whatever it is doing, when the
leader's process ends (end of file on standard input).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import torch

from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import load_model_config
from leadline.engine.runner.collectives.group import RankGroup, device_of
from leadline.engine.runner.memory import oom_message
from leadline.engine.runner.parallel.agreement import checksums
from leadline.engine.runner.parallel.codec import PlanDecoder
from leadline.engine.runner.parallel.messages import Failed, Hello, Loaded, Setup, decode_setup, encode
from leadline.engine.runner.parallel.ring import PlanReader
from leadline.engine.runner.shard import build_shard
from leadline.engine.system.numa import bind_process

__all__ = ["main"]

logger = logging.getLogger("leadline.engine.runner")


def main(argv: list[str]) -> int:
    rank, socket_fd, meeting_fd, plans_fd = map(int, argv)
    # The leader alone decides when we stop: Ctrl-C reaches the whole group of processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_leader, daemon=True, name="leader-watch").start()
    leader = socket.socket(fileno=socket_fd)
    try:
        data = leader.recv(1 << 20)
        if not data:
            return 1
        setup = decode_setup(data)
        logging.basicConfig(
            level=setup.log_level, format=f"%(asctime)s %(levelname)s %(name)s (rank {rank}): %(message)s"
        )
        _serve(setup, leader, meeting_fd, plans_fd)
    except ConnectionError:
        return 1
    except Exception as error:
        logger.debug("rank %d failed", rank, exc_info=error)
        with contextlib.suppress(OSError):
            leader.send(encode(_last_words(setup, error)))
        return 1
    return 0


def _serve(setup: Setup, leader: socket.socket, meeting_fd: int, plans_fd: int) -> None:
    config, device = setup.config, _device(setup)
    bind_process(config.numa, device)
    local = LocalModel(Path(setup.path), setup.model_id, setup.revision)
    model_config = load_model_config(local.path)
    plans = PlanReader(plans_fd, leader)
    leader.send(encode(Hello()))
    group = RankGroup(meeting_fd, setup.rank, config.tensor_parallel, device)
    runner, length = build_shard(config, local, model_config, progress=False, group=group)
    decoder = PlanDecoder(runner.tables)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000_000)
    leader.send(encode(Loaded(runner.num_blocks, length)))
    for data in plans:
        handle = runner.launch(decoder.decode(data))
        if setup.check:
            checksums(group, handle)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device(setup: Setup) -> torch.device:
    if setup.config.device == "cpu":
        return torch.device("cpu")
    device = device_of(setup.rank)
    torch.cuda.set_device(device)
    return device


def _last_words(setup: Setup, error: Exception) -> Failed:
    if isinstance(error, torch.OutOfMemoryError):
        return Failed(
            "OutOfMemory", f"{oom_message(setup.config, 'in a step')}. ({str(error).splitlines()[0]})"
        )
    return Failed(type(error).__name__, str(error)[:10_000])


def _exit_with_leader() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not the interpreter's own way out: destructors of collectives may wait for ranks that have left.
    os._exit(status)
