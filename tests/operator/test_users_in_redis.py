"""Each service has a user of its own in Redis: what a second tenant tries with it, on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from operator_builders import SETTINGS
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from leadline.engine.publisher.publisher import Publisher
from leadline.engine.publisher.settings import PublishSettings, new_epoch
from leadline.gateway.access.shared import SharedWindows
from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod
from leadline.gateway.sync.heartbeats import find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.operator import redis_users
from leadline.operator.kube.kinds import SERVICE
from leadline.operator.kube.store import Store
from leadline.operator.redis_users import RedisUsers, login_of, place_of, user_name
from leadline.operator.settings import OperatorSettings
from leadline.protocol.keys import ServiceKeys
from live_valkey import FAST, PoolPod, until
from valkey_with_users import ValkeyWithUsers

VICTIM, THIEF = ("team-a", "qwen"), ("team-b", "evil")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyWithUsers]:
    with ValkeyWithUsers(tmp_path) as server:
        yield server


def settings_for(valkey: ValkeyWithUsers) -> OperatorSettings:
    return replace(SETTINGS, redis_admin_url=valkey.admin_url)


def add(store: Store, key: tuple[str, str], version: int = 1) -> None:
    metadata = {
        "namespace": key[0],
        "name": key[1],
        "uid": f"uid-{key[1]}",
        "resourceVersion": str(version),
    }
    store.put(SERVICE, {"metadata": metadata, "spec": {}})


class Setup:
    """An operator's users of two tenants, maintained all the time."""

    def __init__(self, valkey: ValkeyWithUsers) -> None:
        self.valkey, self.settings, self.store = valkey, settings_for(valkey), Store()
        self.up: list[bool] = []
        self.clock = 0.0
        add(self.store, VICTIM)
        add(self.store, THIEF)
        self.users = RedisUsers(self.store, self.settings, self.up.append, lambda: self.clock)

    def login(self, key: tuple[str, str], settings: OperatorSettings | None = None) -> tuple[str, str]:
        login = login_of(settings or self.settings, key, f"uid-{key[1]}")
        assert login is not None
        return login

    def client(self, key: tuple[str, str]) -> Any:
        user, password = self.login(key)
        return Redis.from_url(place_of(self.settings), username=user, password=password)


async def works(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


async def eventually(ask: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await ask():  # noqa: ASYNC110 (a server answers)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(users: RedisUsers) -> AsyncIterator[None]:
    task = asyncio.create_task(users.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def maintained(valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(redis_users, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(redis_users, "_LONGEST_PAUSE", 0.2)
    setup = Setup(valkey)
    async with running(setup.users):
        await eventually(lambda: works(setup.client(THIEF)))
        yield setup


ATTEMPTS = [
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "requirepass", ""),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("DEBUG", "SLEEP", "0"),
    ("SCRIPT", "FLUSH"),
    ("EVAL", "return redis.call('KEYS', '*')", "0"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "me", "on", "nopass", "+@all", "~*"),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SUBSCRIBE", "x"),
    ("INFO",),
    ("SHUTDOWN",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("DEL", "leadline:{limits/0123}"),
    ("HGETALL", "leadline:{limits/0123}"),
    ("HSET", "leadline:{limits/0123}", "r", "0"),
    ("HGET", "leadline:{team-a/qwen}:pods", "p"),
    ("HDEL", "leadline:{team-a/qwen}:pods", "p"),
    ("XADD", "leadline:{team-a/qwen}:events", "*", "b", "x"),
    ("XREVRANGE", "leadline:{team-a/qwen}:events", "+", "-"),
    ("SET", "leadline:{team-a/qwen}:snapshot:p", "x"),
    ("XREAD", "STREAMS", "leadline:{team-b/evil}:events", "0"),
    ("SET", "leadline:{team-b/evil}", "x"),
    ("SET", "leadline:{team-b/evil2}:x", "x"),
    ("SET", "other", "x"),
]


async def test_a_second_tenant_can_do_nothing_but_publish_its_own(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with maintained(valkey, monkeypatch) as setup:
        thief = setup.client(THIEF)
        allowed = []
        for words in ATTEMPTS:
            try:
                await thief.execute_command(*words)
            except NoPermissionError:
                continue
            except ResponseError:
                if words[0] == "DEBUG":
                    continue  # refused to every user, before permissions are looked at
            allowed.append(words)
        assert allowed == []
        assert await thief.hset("leadline:{team-b/evil}:pods", "p", "mine") == 1
        await thief.aclose()
        assert not await works(Redis.from_url(valkey.place)), "nobody comes in without a user"
        password = setup.login(THIEF)[1]
        for user in ("default", "gateway", "operator", user_name(setup.settings, VICTIM)):
            assert not await works(Redis.from_url(valkey.place, username=user, password=password))


async def test_an_engine_publishes_and_a_gateway_reads_and_limits_with_their_users(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with maintained(valkey, monkeypatch) as setup:
        pod = engine(setup, tmp_path)
        assert await pod.start(20)
        pods = {"pod-a": Pod("pod-a", "pod-a:8000")}
        index = ServiceIndex()
        sync = RedisSync(ServiceKeys(*VICTIM), valkey.gateway_url, index, find_in(pods))
        sync.start()
        pod.store(1, 2, 3)
        await until(lambda: pods["pod-a"].report is not None and index.in_step("pod-a"))
        windows = SharedWindows(valkey.gateway_url, 5.0)
        windows.start()
        await until(lambda: windows.up)
        assert (await windows.take("alice", 10, 1, 0) or (None,))[0] is True
        assert (await windows.take("alice", 10, 1, 0) or (None,))[0] is False
        windows.settle("alice", -5)
        gateway = Redis.from_url(valkey.gateway_url)
        assert await gateway.hdel("leadline:{team-a/qwen}:pods", "other") == 0, "reports of dead pods"
        for words in (
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("SCRIPT", "FLUSH"),
            ("ACL", "LIST"),
            ("XADD", "leadline:{team-a/qwen}:events", "*", "b", "x"),
            ("SET", "leadline:{team-a/qwen}:snapshot:pod-a", "x"),
            ("DEL", "leadline:{team-a/qwen}:pods"),
        ):
            with pytest.raises(NoPermissionError):
                await gateway.execute_command(*words)
        await gateway.aclose()
        await windows.stop()
        await sync.stop()
        await pod.stop()


def engine(setup: Setup, folder: Path, key: tuple[str, str] = VICTIM) -> PoolPod:
    """A publisher with the files that its pod has mounted."""
    write_login(folder, setup.login(key))
    pod = PoolPod(place_of(setup.settings), "pod-a")
    settings = PublishSettings(
        place_of(setup.settings), ServiceKeys(*key), "pod-a", "pod-a:8000", folder / "login"
    )
    pod.publisher = Publisher(settings, new_epoch(), FAST)
    return pod


def write_login(folder: Path, login: tuple[str, str]) -> None:
    (folder / "login").mkdir(exist_ok=True)
    for name, text in zip(("username", "password"), login, strict=True):
        (folder / "login" / name).write_text(text)


async def test_a_valkey_that_restarts_has_its_users_again_and_engines_go_on(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with maintained(valkey, monkeypatch) as setup:
        pod = engine(setup, tmp_path)
        assert await pod.start(20)
        await asyncio.to_thread(valkey.restart)
        before = pod.publisher.counts.heartbeats
        await until(lambda: pod.publisher.counts.heartbeats > before + 1)
        assert setup.up[0] is True
        await pod.stop()


async def test_users_come_with_services_and_go_with_them(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with maintained(valkey, monkeypatch) as setup:
        other = Redis.from_url(valkey.admin_url)
        await other.execute_command("ACL", "SETUSER", "somebody/else:team-a/qwen", "on", "nopass")
        service = setup.store.service(THIEF)
        assert service is not None
        setup.store.remove(SERVICE, service)

        async def users() -> list[str]:
            return sorted(name.decode() for name in await other.execute_command("ACL", "USERS"))

        async def gone() -> bool:
            return user_name(setup.settings, THIEF) not in await users()

        await eventually(gone)
        assert "somebody/else:team-a/qwen" in await users(), "another operator's"
        assert not await works(setup.client(THIEF))
        assert await works(setup.client(VICTIM))
        await other.aclose()


async def test_a_new_password_of_the_operator_reaches_engines_without_a_restart_and_the_old_one_goes(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a Redis that stays up. Old and new are good until the kubelet has updated the Secret everywhere."""
    async with maintained(valkey, monkeypatch) as setup:
        pod = engine(setup, tmp_path)
        assert await pod.start(20)
    admin = Redis.from_url(valkey.admin_url)
    # It may set users, so it may change its own password.
    await admin.execute_command("ACL", "SETUSER", "operator", "resetpass", ">second-secret")
    await admin.aclose()
    old = setup.login(VICTIM)
    valkey.operator_password = "second-secret"
    changed = replace(setup.settings, redis_admin_url=valkey.admin_url)
    clock = [0.0]
    users = RedisUsers(setup.store, changed, clock=lambda: clock[0])
    new = setup.login(VICTIM, changed)
    assert (new[0], new[1] != old[1]) == (old[0], True)

    def client(login: tuple[str, str]) -> Any:
        return Redis.from_url(place_of(changed), username=login[0], password=login[1])

    async with running(users):
        await eventually(lambda: works(client(new)))
        assert await works(client(old)), "an engine that has not seen the new file yet"
        write_login(tmp_path, new)
        clock[0] = redis_users.GRACE_SECONDS + 1

        async def refused() -> bool:
            return not await works(client(old))

        await eventually(refused)
        assert await works(client(new))
        before = pod.publisher.counts.heartbeats
        await until(lambda: pod.publisher.counts.heartbeats > before + 1)
    await pod.stop()


async def test_a_wrong_administrator_is_reported_once_and_again_when_it_works(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_users, "_LONGEST_PAUSE", 0.05)
    setup = Setup(valkey)
    right, valkey.operator_password = valkey.operator_password, "wrong"
    setup.users._settings = settings_for(valkey)
    valkey.operator_password = right
    async with running(setup.users):
        await until(lambda: setup.up == [False])
        setup.users._settings = settings_for(valkey)
        await until(lambda: setup.up == [False, True])
    (line,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "WRONGPASS" in line
    assert "wrong" not in line.replace("WRONGPASS", "")


async def test_an_engine_without_its_files_publishes_when_they_are_there(
    valkey: ValkeyWithUsers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with maintained(valkey, monkeypatch) as setup:
        pod = engine(setup, tmp_path)
        (tmp_path / "login" / "password").unlink()
        assert not await pod.start(0.2)
        write_login(tmp_path, setup.login(VICTIM))
        await until(lambda: pod.publisher.counts.heartbeats > 0)
        await pod.stop()
