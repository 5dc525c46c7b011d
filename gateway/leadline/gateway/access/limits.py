"""Requests and tokens a minute of each key: taken before a request, settled after it.

The numbers come with the key (Principal), or from the configuration for keys without numbers. Requests are
counted by key, in a sliding minute (window.py), in Redis for all gateways together. When Redis is away or
slow (P15), each gateway uses its own count and allows its part of the limit. It always counts both ways, so
no key starts from zero when Redis fails.

Headers, in OpenAI's spelling, for each limit that the key has:

    X-RateLimit-Limit-Requests       a minute
    X-RateLimit-Remaining-Requests   left now
    X-RateLimit-Reset-Requests       until all of it is there again: "12.5s"
    X-RateLimit-*-Tokens             the same for tokens
"""

import math
import time

from leadline.gateway.access.principal import Principal
from leadline.gateway.access.shared import SharedWindows
from leadline.gateway.access.window import LocalWindows, Usage, wait_for, wait_until_empty
from leadline.gateway.config.settings import RateLimitConfig
from leadline.gateway.errors import ConfigError, RateLimited

__all__ = ["RateLimits"]


class RateLimits:
    """`start`, then `take` and `settle`, then `stop`. On one event loop."""

    def __init__(
        self, redis_url: str = "", config: RateLimitConfig | None = None, *, workers: int = 1
    ) -> None:
        """`workers`: processes of this gateway, each of which allows its part while Redis is away. Raises
        ConfigError for a URL that cannot be read."""
        self._config = config or RateLimitConfig()
        self._share = 1.0 / (self._config.replicas * max(1, workers))
        self._local = LocalWindows()
        try:
            self._shared = SharedWindows(redis_url, self._config.redis_timeout_seconds) if redis_url else None
        except ValueError as error:
            raise ConfigError(f"redis_url: {error}") from None
        self.taken_locally = 0
        """Requests decided without Redis."""

    def start(self) -> None:
        """Connect to Redis in the background; until that is done this gateway counts by itself."""
        if self._shared is not None:
            self._shared.start()

    async def stop(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    @property
    def shared(self) -> bool:
        """Whether counting goes by Redis at present."""
        return self._shared is not None and self._shared.up

    def apply_to(self, principal: Principal) -> bool:
        """Whether the key has limits at all."""
        return self._limits(principal) is not None

    async def take(self, principal: Principal, tokens: int) -> dict[str, str]:
        """Count a request that will take about so many tokens, prompt and output.

        Returns X-RateLimit-* headers, empty without limits. Raises RateLimited (429) with `retry_after` and
        the headers; what is refused is not counted. Takes at most `redis_timeout_seconds`.
        """
        limits = self._limits(principal)
        if limits is None:
            return {}
        max_requests, max_tokens = limits
        now, name = time.monotonic(), principal.name
        answer = None
        if self._shared is not None:
            answer = await self._shared.take(name, tokens, max_requests, max_tokens)
        if answer is None:
            self.taken_locally += 1
            # At least 1: a small limit over many gateways must not become none at all.
            max_requests = math.ceil(max_requests * self._share)
            max_tokens = math.ceil(max_tokens * self._share)
            requests_used, tokens_used = self._local.usage(name, now)
            fits = requests_used.fits(1, max_requests) and tokens_used.fits(tokens, max_tokens)
            if fits:
                self._local.add(name, now, 1, tokens)
                requests_used, tokens_used = self._local.usage(name, now)
        else:
            fits, requests_used, tokens_used = answer
            if fits:
                self._local.add(name, now, 1, tokens)
        headers = {
            **_headers("Requests", requests_used, max_requests),
            **_headers("Tokens", tokens_used, max_tokens),
        }
        if not fits:
            raise _refusal(tokens, requests_used, max_requests, tokens_used, max_tokens, headers)
        return headers

    def settle(self, principal: Principal, difference: int) -> None:
        """Correct the count: the request took `difference` more tokens (fewer, if negative) than `take`
        counted. Never waits, never raises; while Redis is away only this gateway's count is corrected."""
        limits = self._limits(principal)
        if limits is None or not limits[1] or not difference:
            return
        self._local.add(principal.name, time.monotonic(), 0, difference)
        if self._shared is not None:
            self._shared.settle(principal.name, difference)

    def _limits(self, principal: Principal) -> tuple[int, int] | None:
        requests = principal.requests_per_minute or self._config.requests_per_minute
        tokens = principal.tokens_per_minute or self._config.tokens_per_minute
        return (requests, tokens) if requests or tokens else None


def _headers(what: str, usage: Usage, limit: int) -> dict[str, str]:
    if not limit:
        return {}
    return {
        f"X-RateLimit-Limit-{what}": str(limit),
        f"X-RateLimit-Remaining-{what}": str(max(0, math.floor(limit - usage.used + 1e-9))),
        f"X-RateLimit-Reset-{what}": f"{wait_until_empty(usage):.3g}s",
    }


def _refusal(
    tokens: int,
    requests_used: Usage,
    max_requests: int,
    tokens_used: Usage,
    max_tokens: int,
    headers: dict[str, str],
) -> RateLimited:
    if max_tokens and tokens > max_tokens:
        return RateLimited(
            f"this request is about {tokens} tokens, prompt and output together, and this key may use "
            f"{max_tokens} a minute: shorten it or lower max_tokens",
            code="request_too_large",
            headers=headers,
        )
    waits = []
    if not requests_used.fits(1, max_requests):
        waits.append((wait_for(requests_used, 1, max_requests), f"{max_requests} requests a minute"))
    if not tokens_used.fits(tokens, max_tokens):
        waits.append((wait_for(tokens_used, tokens, max_tokens), f"{max_tokens} tokens a minute"))
    what = " and ".join(text for _, text in waits) or "a limit"
    seconds = max(1, math.ceil(max((wait or 0.0 for wait, _ in waits), default=1.0)))
    return RateLimited(
        f"this key has used its {what}; try again in {seconds} s",
        code="rate_limit_exceeded",
        retry_after=float(seconds),
        headers=headers,
    )
