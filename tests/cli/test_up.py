"""`leadline up` and the parts it is made of, without requests (tests/gateway/e2e has those)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from leadline.cli.launcher import EngineSettings, Stack, StackSettings
from leadline.cli.launcher.child import Child, ending
from leadline.cli.launcher.engines import share_gpus, visible_gpus
from leadline.cli.launcher.ports import ReservedPort
from leadline.engine.errors import ConfigError
from leadline.protocol.keys import ServiceKeys


def up(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leadline.cli.main", "up", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
    )


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("no-such-model",), "no-such-model"),
        (("smollm2", "--replicas=0"), "replicas must be at least 1, not 0"),
        (("smollm2", "--workers=0"), "workers must be at least 1, not 0"),
        (("smollm2", "--port=70000"), "port must lie between 0 and 65535"),
        (("smollm2", "--drain-timeout=-1"), "drain_timeout must not be negative"),
        (("smollm2", "--block-size=7"), "block_size must be 16, 32, 64, 128 or 256, not 7"),
        (("smollm2", "--port=0", "--host=192.0.2.1"), "cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    arguments: tuple[str, ...], complaint: str
) -> None:
    result = up(*arguments)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("leadline: ")
    assert complaint in line


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = up("smollm2", f"--port={port}")
    assert result.returncode == 1
    assert result.stderr == f"leadline: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("option", "part", "complaint"),
    [
        ("--eviction-policy=nonsense", "engine-", "nonsense"),
        ("--policy=nonsense", "gateway", "there is no routing policy 'nonsense'"),
    ],
)
def test_a_part_that_cannot_start_ends_all_with_its_own_message(
    option: str, part: str, complaint: str
) -> None:
    result = up("smollm2", "--port=0", "--replicas=1", f"--cpu-kv-bytes={64 << 20}", option)
    assert result.returncode == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"leadline: {part}")
    assert "ended (exit code 1): " in last
    assert complaint in last


# -- names in Redis ------------------------------------------------------------------------------------------


async def test_two_stacks_on_one_redis_do_not_take_each_others_engines_for_their_own() -> None:
    """Their pods are all called engine-0: a gateway would believe the other's load, blocks and model name."""
    engines = EngineSettings(Path("/model"), "m", {})
    one, other, alone = (
        Stack(StackSettings(engines, 1, port=0, redis_url=url), print)
        for url in ("redis://shared", "redis://shared", "")
    )
    try:
        assert one.service != other.service
        assert ServiceKeys(*one.service.split("/")).pods
        config = json.loads(one._gateway_config("prefix").read_text())
        assert config["services"][0]["name"] == one.service
        assert config["responses"]["store_seconds"] == 3600
        assert alone.service == "local/leadline"
    finally:
        for stack in (one, other, alone):
            await stack.stop()


# -- ports ---------------------------------------------------------------------------------------------------


def test_a_reserved_port_is_free_for_its_server_and_for_nobody_else() -> None:
    with ReservedPort() as reserved:
        for _ in range(3):  # starts of a server
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", reserved.port), 5)
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("127.0.0.1", reserved.port))
                server.listen()
                with socket.create_connection(("127.0.0.1", reserved.port), 5):
                    with pytest.raises(ConfigError, match="cannot listen"):
                        ReservedPort("127.0.0.1", reserved.port)
                    server.accept()[0].close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", reserved.port))


# -- children ------------------------------------------------------------------------------------------------

FAMILY = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
{then}
"""


def family(then: str, heard: list[str]) -> Child:
    """A process that has a child which ignores SIGTERM."""
    return Child([sys.executable, "-c", FAMILY.format(then=then)], os.environ, heard.append)


async def test_the_end_of_a_child_is_the_end_of_its_group() -> None:
    heard: list[str] = []
    child = family("print('leadline: it is over', file=sys.stderr, flush=True); sys.exit(3)", heard)
    assert await child.wait() == 3
    assert ending(3) == "exit code 3"
    assert child.last_words == "it is over"
    await until(lambda: not psutil.pid_exists(int(heard[0])))


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    heard: list[str] = []
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    child = family(deaf, heard)
    await until(lambda: "on" in heard)
    began = time.monotonic()
    await child.stop(0.3)
    assert time.monotonic() - began < 10
    code = await child.wait()
    assert code == -signal.SIGKILL
    assert ending(code) == "killed by SIGKILL"
    await until(lambda: not psutil.pid_exists(int(heard[0])))


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from leadline.cli.launcher.child import Child\n"
        "async def main():\n"
        "    child = Child([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE))


# -- GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "replicas", "tensor_parallel", "expected"),
    [
        ("ab", 2, 1, ([["a"], ["b"]], 1)),
        ("abcd", 2, 2, ([["a", "b"], ["c", "d"]], 1)),
        ("abcd", 1, 2, ([["a", "b"]], 1)),
        ("a", 3, 1, ([["a"], ["a"], ["a"]], 3)),
        ("ab", 3, 1, ([["a"], ["b"], ["a"]], 2)),
    ],
)
def test_gpus_are_shared_out(
    gpus: str, replicas: int, tensor_parallel: int, expected: tuple[list[list[str]], int]
) -> None:
    assert share_gpus(list(gpus), replicas, tensor_parallel) == expected


def test_replicas_that_need_more_gpus_than_there_are_cannot_share() -> None:
    with pytest.raises(ConfigError, match="2 replicas with tensor_parallel 2 need 4 GPUs; there are 3"):
        share_gpus(list("abc"), 2, 2)


def test_the_environment_says_which_gpus_are_ours() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, 3"}) == ["1", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
