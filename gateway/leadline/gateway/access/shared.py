"""The counters of all gateways together, in Redis: one round trip for all requests that ask at the same time.

Requests put their question in a list; one task sends the list as a pipeline over the one connection and
returns the answers. So a request that gives up disturbs no other, a burst needs no burst of connections, and
the connection is there before the first request.

    up ──an error, or three late answers in a row──▶ down ──a quick PING, tried with growing pauses──▶ up

While down, `take` answers None at once; limits.py then counts by itself. Redis' own clock decides which
minute it is, so that gateways whose clocks differ agree.
"""

import asyncio
import hashlib
import logging
import time
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from leadline.gateway.access.window import Usage
from leadline.gateway.redis_client import connect, redacted

__all__ = ["SharedWindows"]

log = logging.getLogger(__name__)

# One hash a key: m minute, r and t this minute's requests and tokens, s and u the last one's. ARGV: requests,
# tokens, limit of requests, limit of tokens. A negative limit: count without asking (settling).
_SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local minute = math.floor(now / 60)
local phase = now / 60 - minute
local held = redis.call('HMGET', KEYS[1], 'm', 'r', 't', 's', 'u')
local before = tonumber(held[1] or minute)
local r, t = tonumber(held[2] or 0), tonumber(held[3] or 0)
local s, u = tonumber(held[4] or 0), tonumber(held[5] or 0)
if before ~= minute then
  if before == minute - 1 then s, u = r, t else s, u = 0, 0 end
  r, t = 0, 0
end
local requests, tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local max_requests, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
local fits = 1
if max_requests > 0 and s * (1 - phase) + r + requests > max_requests + 1e-9 then fits = 0 end
if max_tokens > 0 and u * (1 - phase) + t + tokens > max_tokens + 1e-9 then fits = 0 end
if fits == 1 then
  r, t = r + requests, t + tokens
  if t < 0 then u, t = math.max(0, u + t), 0 end
  redis.call('HSET', KEYS[1], 'm', minute, 'r', r, 't', t, 's', s, 'u', u)
  redis.call('PEXPIRE', KEYS[1], 130000)
end
return {fits, math.floor(phase * 1e6), r, s, t, u}
"""
_SHA = hashlib.sha1(_SCRIPT.encode()).hexdigest()
_BATCH = 512
_PATIENCE = 1.0
"""Seconds for connecting, and after which a connection that does not answer is given up."""
_LATE = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

Answer = tuple[bool, Usage, Usage]


class SharedWindows:
    """`start`, then `take` and `settle`, then `stop`."""

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout`: seconds that `take` waits at most. Raises ValueError for a URL that cannot be read."""
        self._redis = connect(url, _PATIENCE)
        self._place = redacted(url)
        self._timeout = timeout
        self._questions: list[tuple[str, tuple[int, int, int, int], asyncio.Future[Answer] | None]] = []
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.up = False
        """Whether Redis is asked at present."""
        self.outages = 0
        self._late = 0
        self._counted = False
        """Redis has counted something since it was last up; it may answer and refuse to write."""

    def start(self) -> None:
        """Connect in the background. On a running loop."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.create_task(self._run(), name="rate-limits")

    async def stop(self) -> None:
        """End the task and the connection. May be called twice."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()  # redis-py may forget it (RedisSync.stop): the flag ends the task then
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._redis.aclose()

    async def take(self, name: str, tokens: int, max_requests: int, max_tokens: int) -> Answer | None:
        """Count one request of the key if it fits: (whether it did, requests, tokens), counted in already.
        None: Redis is away or slow."""
        if not self.up:
            return None
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._ask(name, (1, tokens, max_requests, max_tokens), answer)
        try:
            async with asyncio.timeout(self._timeout):
                result = await answer
        except TimeoutError:
            # One alone may be this process having been busy.
            self._late += 1
            if self._late >= _LATE:
                self._down("no answer in time")
            return None
        except (RedisError, OSError):
            return None
        self._late = 0
        return result

    def settle(self, name: str, tokens: int) -> None:
        """Correct the tokens of a key, soon."""
        if self.up:
            self._ask(name, (0, tokens, -1, -1), None)

    # -- inside ----------------------------------------------------------------------------------------------

    def _ask(
        self, name: str, numbers: tuple[int, int, int, int], answer: asyncio.Future[Answer] | None
    ) -> None:
        self._questions.append((name, numbers, answer))
        self._asked.set()

    def _down(self, reason: object) -> None:
        if self.up:
            self.up = False
            self.outages += 1
            log.warning("limits: counting without Redis at %s: %s", self._place, reason)
        self._asked.set()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping:
            try:
                if await self._quick():
                    log.info("limits: counting in Redis at %s", self._place)
                    self.up, self._late, self._counted = True, 0, False
                    await self._serve()
            except (RedisError, OSError, TimeoutError) as error:
                self._down(type(error).__name__)
            except asyncio.CancelledError:
                self._give_up()
                raise
            except Exception as error:  # what answers may be no Redis
                log.debug("limits: %s answered what no Redis does", self._place, exc_info=error)
                self._down(type(error).__name__)
            self._give_up()
            if self._counted:
                self._counted, pause = False, _FIRST_PAUSE
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _quick(self) -> bool:
        """Connects if need be, and says whether Redis answers in time."""
        await self._redis.script_load(_SCRIPT)
        asked = time.monotonic()
        await self._redis.ping()
        return time.monotonic() - asked <= self._timeout

    async def _serve(self) -> None:
        """Until Redis is down."""
        while self.up and not self._stopping:
            await self._asked.wait()
            self._asked.clear()
            while self.up and self._questions and not self._stopping:
                batch, self._questions = self._questions[:_BATCH], self._questions[_BATCH:]
                try:
                    await self._send(batch)
                except BaseException:
                    _refuse(batch)
                    raise

    async def _send(self, batch: list[Any]) -> None:
        # Requests that are done have given up waiting; this gateway alone counts them.
        batch[:] = [question for question in batch if question[2] is None or not question[2].done()]
        if not batch:
            return
        pipe = self._redis.pipeline(transaction=False)
        for name, numbers, _ in batch:
            pipe.evalsha(_SHA, 1, _key(name), *numbers)
        replies = await pipe.execute(raise_on_error=False)
        if any(isinstance(reply, NoScriptError) for reply in replies):  # restarted, or its scripts flushed
            await self._redis.script_load(_SCRIPT)
            await self._send(batch)
            return
        for (_, _, answer), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            self._counted = True
            if answer is not None and not answer.done():
                fits, phase, requests, requests_before, tokens, tokens_before = map(int, reply)
                share = phase / 1e6
                answer.set_result(
                    (bool(fits), Usage(requests_before, requests, share), Usage(tokens_before, tokens, share))
                )

    def _give_up(self) -> None:
        self.up = False
        questions, self._questions = self._questions, []
        _refuse(questions)


def _refuse(questions: list[Any]) -> None:
    for _, _, answer in questions:
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError("Redis is away"))


def _key(name: str) -> str:
    """Names of keys may hold anything, also what Redis Cluster would read as a hash tag."""
    return "leadline:{limits/" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32] + "}"
