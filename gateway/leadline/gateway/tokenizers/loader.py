"""Loads the tokenizer of one service: exact tokens where possible, else matching by text.

    text ──folder loads──────────────────────────────┐
     ▲ ▲                                              ▼
     │ └─ differs ── compared with a ready pod ◀── exact, not compared ──▶ exact
     │                       ▲                                              │
     └── until it loads ── fetched from a pod ◀── pods report another digest ┘

The wanted tokenizer is the one that most ready pods report, so that a rollout to another model changes it
once. While some pods still have the other one, their chains have other names anyway (another revision).

The exchange is one assignment between two requests: a request that has begun keeps the tokens it began with.
The index stays the same object all along, fed by the reader of Redis whatever the mode; only how long this
gateway's own guesses live changes.
"""

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp

from leadline.gateway.pods import Pod
from leadline.gateway.services import Service
from leadline.gateway.tokenizers.bundles import BundleRefused, TokenPool, fetch_bundle, fetch_names_and_task
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.mode import ASSUMED_TTL, EVENTS_TTL, Reason, TokenMode
from leadline.gateway.tokens.parity import ParityReport, check_parity
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import LeadlineError

__all__ = ["TokenizerLoader"]

logger = logging.getLogger("leadline.gateway")

_LOOK_SECONDS = 0.5
_FIRST_RETRY, _LAST_RETRY = 0.5, 60.0
_LAST_RETRY_UNREACHABLE = 5.0
"""A pod that does not answer may do so any moment, such as when its network policy has come into force."""
_ASK_AGAIN = 60.0
"""Where pods report no digest: how often one is asked whether its tokenizer is still the same."""


class TokenizerLoader:
    """`run` it as a task, for as long as the service is known."""

    def __init__(
        self,
        service: Service,
        pool: TokenPool,
        session: aiohttp.ClientSession,
        *,
        events: bool,
        headers: dict[str, str] | None = None,
        changed: Callable[[Service], None],
        compared: Callable[[Service, ParityReport], None],
    ) -> None:
        """`events`: pods' cache events reach the index. `changed`: the service's `token_mode` is another now.
        `headers`: of requests to pods."""
        self._service = service
        self._pool = pool
        self._session = session
        self._guesses = EVENTS_TTL if events else ASSUMED_TTL
        self._headers = headers or {}
        self._changed = changed
        self._compared = compared
        self._loaded: tuple[str, TokenService] | None = None
        """The digest of what was loaded last ("": none can be told), and the tokens."""
        self._settled: str | None = None
        """Digest that was wanted when a comparison with a pod ended well."""
        self._due = 0.0
        """No try before this time, unless another digest is wanted than `_tried`."""
        self._tried: str | None = None
        self._pause = _FIRST_RETRY

    async def run(self) -> None:
        """Until cancelled."""
        await self._load_folder()
        while True:
            try:
                await self._look()
            except Exception:
                logger.exception("%s: the tokenizer could not be looked after", self._service.name)
                self._retry_later()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _load_folder(self) -> None:
        """Without asking anybody: exact before there is a pod, if the configuration names a folder."""
        folder = self._service.model
        if not folder or not await asyncio.to_thread(os.path.isdir, folder):
            return
        try:
            self._loaded = await self._pool.of_folder(Path(folder))
        except (LeadlineError, OSError, ValueError) as error:
            logger.warning("%s: no tokenizer in %s: %s", self._service.name, folder, error)
            return
        self._use(self._loaded[1], f"tokenizer of {folder} loaded")

    async def _look(self) -> None:
        pods = [pod for pod in self._service.pods.values() if pod.ready and not pod.draining]
        if not pods:
            return
        wanted = self._wanted(pods)
        now = time.monotonic()
        if wanted == self._settled and (wanted or now < self._due):
            return
        if wanted == self._tried and now < self._due:
            return
        if wanted != self._tried:
            self._tried, self._pause = wanted, _FIRST_RETRY
        pod = random.choice([pod for pod in pods if not wanted or _digest(pod) == wanted])
        await self._try(pod, wanted)

    async def _try(self, pod: Pod, wanted: str) -> None:
        if pod.report is None and not pod.served_names:
            # Without heartbeats there is no other source.
            pod.served_names, pod.task = await fetch_names_and_task(
                self._session, pod.address, headers=self._headers
            )
        refused: BundleRefused | None = None
        try:
            await self._load_from(pod, wanted)
        except BundleRefused as error:
            refused = error
        if self._loaded is None:
            assert refused is not None
            self._fall_back(refused.reason, str(refused))
            self._retry_later(refused.reason)
            return
        # What was loaded may be all there is, refused or not: it will do if it agrees.
        _, tokens = self._loaded
        report = await check_parity(
            self._session, f"http://{pod.address}", tokens, headers=self._headers, seconds=10.0
        )
        self._compared(self._service, report)
        if report.agrees is False:
            detail = str(report) if refused is None else f"{report}; and another cannot be had: {refused}"
            self._fall_back(Reason.DIFFERS, detail)
            self._retry_later()
            return
        self._use(tokens, f"tokenizer of {pod.address} in use" if refused is None else f"kept: {refused}")
        self._settled = wanted
        self._due = time.monotonic() + _ASK_AGAIN

    async def _load_from(self, pod: Pod, wanted: str) -> None:
        """Make `_loaded` be the pod's tokenizer. Raises BundleRefused."""
        known = self._loaded[0] if self._loaded is not None else ""
        if wanted and known == wanted:
            return
        shared = self._pool.get(wanted) if wanted else None
        if shared is not None:
            self._loaded = (wanted, shared)
            return
        data = await fetch_bundle(
            self._session, pod.address, headers=self._headers, known=known, expected=wanted
        )
        if data is not None:
            self._loaded = await self._pool.of_bundle(data)

    def _wanted(self, pods: list[Pod]) -> str:
        """The digest that most pods report, of equals the one in use; empty: none reports any."""
        votes = Counter(digest for pod in pods if (digest := _digest(pod)))
        if not votes:
            return ""
        return max(votes, key=lambda digest: (votes[digest], digest == self._settled, digest))

    def _use(self, tokens: TokenService, why: str) -> None:
        service = self._service
        if service.tokens is tokens:
            return
        # One step between two requests: no await between here and the return.
        service.tokens = tokens
        service.index.guess_for(self._guesses)
        service.token_mode = TokenMode(None, why)
        self._changed(service)
        logger.info("%s: matching by tokens: %s", service.name, why)

    def _fall_back(self, reason: Reason, detail: str) -> None:
        service, before = self._service, self._service.token_mode
        if not isinstance(service.tokens, ApproximateTokens):
            service.tokens = ApproximateTokens()
            service.index.guess_for(ASSUMED_TTL)
        self._settled = None
        service.token_mode = TokenMode(reason, detail)
        if before.reason is not reason:
            self._changed(service)
            logger.warning("%s: matching by text (%s): %s", service.name, reason.value, detail)

    def _retry_later(self, reason: Reason | None = None) -> None:
        last = _LAST_RETRY_UNREACHABLE if reason is Reason.UNREACHABLE else _LAST_RETRY
        self._due = time.monotonic() + min(self._pause, last) * random.uniform(0.7, 1.0)
        self._pause = min(2 * self._pause, last)


def _digest(pod: Pod) -> str:
    return pod.report.tokenizer if pod.report is not None else ""
