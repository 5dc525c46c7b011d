"""Requests and tokens a minute against a real Valkey, present, absent, slow, flushed and restarted (P15)."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import redis

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.access.limits import RateLimits
from leadline.gateway.access.principal import ANONYMOUS, Principal
from leadline.gateway.access.shared import SharedWindows
from leadline.gateway.config.settings import RateLimitConfig
from leadline.gateway.errors import ConfigError, RateLimited
from live_valkey import until

# A loaded machine must not look like a slow Redis.
PATIENT = RateLimitConfig(redis_timeout_seconds=2.0)
ALICE = Principal(tenant="t", name="alice {x} ключ", requests_per_minute=10, tokens_per_minute=1_000)
MANY = Principal(tenant="t", name="many", requests_per_minute=100_000)


@contextlib.asynccontextmanager
async def limits(
    url: str = "", config: RateLimitConfig = PATIENT, workers: int = 1
) -> AsyncIterator[RateLimits]:
    made = RateLimits(url, config, workers=workers)
    made.start()
    try:
        if url:
            await until(lambda: made.shared)
        yield made
    finally:
        await made.stop()


async def taken(door: RateLimits, who: Principal, tokens: int = 1, tries: int = 100) -> int:
    """How many requests get through."""
    count = 0
    for _ in range(tries):
        try:
            await door.take(who, tokens)
            count += 1
        except RateLimited:
            return count
    return count


async def test_a_key_gets_its_requests_and_then_429_with_retry_after(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        headers = await door.take(ALICE, 100)
        assert headers["X-RateLimit-Limit-Requests"] == "10"
        assert headers["X-RateLimit-Remaining-Requests"] == "9"
        assert headers["X-RateLimit-Limit-Tokens"] == "1000"
        assert headers["X-RateLimit-Remaining-Tokens"] == "900"
        assert 0 < float(headers["X-RateLimit-Reset-Requests"].rstrip("s")) <= 120
        assert await taken(door, ALICE) == 9
        with pytest.raises(RateLimited) as refused:
            await door.take(ALICE, 1)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert 1 <= refused.value.retry_after <= 120
        assert refused.value.headers["X-RateLimit-Remaining-Requests"] == "0"
        assert door.taken_locally == 0


async def test_tokens_are_limited_as_well_and_settled_afterwards(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        await door.take(ALICE, 900)
        with pytest.raises(RateLimited) as refused:
            await door.take(ALICE, 200)
        assert refused.value.headers["X-RateLimit-Remaining-Tokens"] == "100"
        assert refused.value.headers["X-RateLimit-Remaining-Requests"] == "9", "a refusal takes nothing"
        door.settle(ALICE, -500)
        headers = await door.take(ALICE, 200)
        assert headers["X-RateLimit-Remaining-Tokens"] == "400"


async def test_a_request_larger_than_the_limit_is_told_that_waiting_will_not_help() -> None:
    async with limits() as door:
        with pytest.raises(RateLimited) as refused:
            await door.take(ALICE, 1_001)
        assert refused.value.code == "request_too_large"
        assert refused.value.retry_after is None


async def test_gateways_share_the_limit(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as one, limits(valkey.url) as other:
        counts = await asyncio.gather(taken(one, ALICE), taken(other, ALICE))
        assert sum(counts) == 10


async def test_many_at_once_get_exactly_the_limit(valkey: EmbeddedValkey) -> None:
    who = Principal(tenant="t", name="many", requests_per_minute=300)
    async with limits(valkey.url) as door:
        outcomes = await asyncio.gather(*(door.take(who, 1) for _ in range(1_000)), return_exceptions=True)
        assert sum(isinstance(outcome, dict) for outcome in outcomes) == 300
        assert sum(isinstance(outcome, RateLimited) for outcome in outcomes) == 700
        assert door.taken_locally == 0


async def test_keys_without_limits_cost_nothing_and_get_no_headers(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        assert await door.take(ANONYMOUS, 10_000_000) == {}
        door.settle(ANONYMOUS, 5)
    assert redis.Redis.from_url(valkey.url).dbsize() == 0


async def test_limits_of_the_configuration_hold_for_keys_without_their_own() -> None:
    async with limits(config=RateLimitConfig(requests_per_minute=3)) as door:
        assert await taken(door, ANONYMOUS) == 3


async def test_without_redis_each_gateway_allows_its_part() -> None:
    async with limits(config=RateLimitConfig(replicas=2), workers=2) as door:
        assert await taken(door, ALICE) == 3  # a quarter of 10, rounded up


async def test_without_redis_a_clock_that_is_set_back_holds_nobody_up(monkeypatch) -> None:
    clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 5_000.0)
    monkeypatch.setattr("leadline.gateway.access.limits.time", clock)
    async with limits() as door:
        assert await taken(door, ALICE) == 10
        clock.time, clock.monotonic = (lambda: 1e9 - 3_600), (lambda: 5_121.0)
        assert await taken(door, ALICE) == 10


async def test_redis_that_is_away_at_the_start_is_used_once_it_comes(valkey: EmbeddedValkey) -> None:
    valkey.kill()
    door = RateLimits(valkey.url, PATIENT)
    door.start()
    try:
        await door.take(ALICE, 1)
        assert door.taken_locally == 1
        valkey.restart()
        await until(lambda: door.shared)
        await door.take(ALICE, 1)
        assert door.taken_locally == 1
    finally:
        await door.stop()


async def test_redis_that_dies_leaves_the_gateways_own_count_in_force(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        assert await taken(door, ALICE, tries=4) == 4
        valkey.kill()
        assert await taken(door, ALICE) == 6, "it does not start from zero"
        assert not door.shared
        valkey.restart()
        await until(lambda: door.shared)
        await door.take(ALICE, 1)  # Redis came back empty


async def test_what_is_no_redis_is_asked_again_until_it_is_one(valkey: EmbeddedValkey) -> None:
    """It says OK to everything, which no count is."""
    valkey.kill()
    clients: list[asyncio.StreamWriter] = []

    async def fine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(writer)
        while received := await reader.read(1 << 16):
            writer.write(b"+OK\r\n" * len(re.findall(rb"(?:\A|\r\n)\*\d+\r\n", received)))

    path = valkey.address.removeprefix("unix:")
    windows = SharedWindows(valkey.url, timeout=2.0)
    async with await asyncio.start_unix_server(fine, path):  # takes the place of what is left there
        windows.start()
        await until(lambda: windows.up)
        assert await windows.take("key", 1, 10, 10) is None
        await until(lambda: windows.outages == 1)
    for writer in clients:
        writer.close()
    valkey.restart()
    try:
        answers: list[object] = [None]
        while answers[-1] is None and len(answers) < 5:  # the first may find the connection gone
            await until(lambda: windows.up)
            answers.append(await windows.take("key", 1, 10, 10))
        assert answers[-1] is not None
    finally:
        await windows.stop()


async def test_redis_whose_scripts_and_data_were_flushed_goes_on(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        await door.take(ALICE, 1)
        client = redis.Redis.from_url(valkey.url)
        client.script_flush()
        client.flushall()
        headers = await door.take(ALICE, 1)
        assert headers["X-RateLimit-Remaining-Requests"] == "9"
        assert door.taken_locally == 0


async def test_redis_that_takes_no_writes_is_asked_less_and_less(valkey: EmbeddedValkey) -> None:
    """It is full (noeviction), or a replica since a failover, and answers all the same: each time that it is
    tried again is two lines in the log."""
    client = redis.Redis.from_url(valkey.url)
    async with limits(valkey.url) as door:
        client.config_set("maxmemory", "1mb")
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            await door.take(MANY, 1)
            await asyncio.sleep(0.01)
        assert door._shared is not None
        assert 2 <= door._shared.outages <= 8
        client.config_set("maxmemory", "0")
        await until(lambda: door.shared)
        taken_locally = door.taken_locally
        await door.take(MANY, 1)
        assert door.taken_locally == taken_locally


async def test_redis_that_hangs_delays_a_few_requests_by_the_timeout_and_the_rest_not_at_all(
    valkey: EmbeddedValkey,
) -> None:
    who = Principal(tenant="t", name="many", requests_per_minute=100_000)
    config = RateLimitConfig(redis_timeout_seconds=0.2)
    async with limits(valkey.url, config) as door:
        await door.take(who, 1)
        os.kill(valkey.pid, signal.SIGSTOP)
        started = time.monotonic()
        await asyncio.gather(*(door.take(who, 1) for _ in range(100)))
        assert time.monotonic() - started < 50 * 0.2, "all of them wait together, once"
        assert not door.shared
        started = time.monotonic()
        for _ in range(1_000):
            await door.take(who, 1)
        assert time.monotonic() - started < 10 * 0.2, "Redis is not asked any more"
        os.kill(valkey.pid, signal.SIGCONT)
        await until(lambda: door.shared)


async def test_a_client_that_leaves_while_redis_is_asked_disturbs_nobody(valkey: EmbeddedValkey) -> None:
    async with limits(valkey.url) as door:
        tasks = [asyncio.create_task(door.take(ALICE, 1)) for _ in range(8)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, dict) for outcome in outcomes[1::2])
        assert door.shared


async def test_a_redis_url_that_cannot_be_read_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        RateLimits("redis://:secret@host:notaport/0")
    assert "secret" not in str(refused.value)


async def test_it_stops_in_the_middle_of_traffic(valkey: EmbeddedValkey) -> None:
    """redis-py forgets a cancellation that comes as a command has just been sent (Python 3.11)."""
    for number in range(100):
        windows = SharedWindows(valkey.url, timeout=2.0)
        windows.start()
        await until(lambda windows=windows: windows.up)
        asking = [asyncio.create_task(windows.take("busy", 1, 100_000, 100_000)) for _ in range(10)]
        for _ in range(number % 25):  # wherever it stands
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await windows.stop()
            await asyncio.gather(*asking)
