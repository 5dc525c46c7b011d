"""`AsyncEngine`: the engine for servers. Owns the core process, the tokenizer, and every request in flight.

    engine = await AsyncEngine.start(config)
    async for delta in engine.generate(prompt_token_ids, sampling, ...):
        ...
    await engine.stop()

Further processes may share the core: `attach` returns a `Membership`, with which `AsyncEngine.join` makes an
engine there. It has its own requests, tokenizer and numbers in flight, and the figures of the whole core.

Everything here runs in one event loop's thread:

    generate ──validate──▶ Streams.open ──────Add──────▶ core process
       ▲                                                    │ one Outputs message a step
       └── deque of the request ◀───── Streams.deliver ◀─────┘
           or the caller's `on_delta`

A request's deque is bounded by its own max_tokens, so a slow reader delays no other and costs no
more memory than its answer. Closing the iterator (or cancelling the task inside it) aborts the request in the
core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from leadline.engine import wire
from leadline.engine.client.core_client import DEFAULT_FACTORY, CoreClient, CoreLink
from leadline.engine.client.streams import DeltaCallback, Streams
from leadline.engine.config import EngineConfig
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import EngineDead, LeadlineError, UnsupportedModel
from leadline.engine.frontend.constraints import load_constraint_provider
from leadline.engine.frontend.output_processor import OutputProcessor
from leadline.engine.frontend.reasoning import ModelReasoning
from leadline.engine.frontend.reasoning import detect_format as detect_reasoning
from leadline.engine.frontend.tool_formats import ToolFormat, detect_format, format_named
from leadline.engine.frontend.validation import RequestBuilder
from leadline.engine.messages import CoreOutput, CoreRequest, PoolingRequest, PriorityClass, ThoughtSpec
from leadline.engine.models.config import ModelConfig, load_model_config
from leadline.engine.outputs import OutputDelta
from leadline.engine.pooling.builder import PoolingBuilder
from leadline.engine.pooling.calls import PoolingCalls
from leadline.engine.pooling.spec import PoolingSpec, Task, read_pooling
from leadline.engine.sampling_params import SamplingParams
from leadline.protocol.openai.service import PrefixChain
from leadline.protocol.text.bundle import bundle_digest, encode_bundle
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import PromptInput, prompt_token_ids
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "Membership", "WarmupReport"]


logger = logging.getLogger("leadline.engine")

_INLINE_CHARACTERS = 16_384

ProgressFn = Callable[[wire.Progress], None]
CacheChangeFn = Callable[[wire.CacheChange], None]


@dataclass(slots=True)
class ModelTexts:
    """What a process that serves a model knows of its texts."""

    tokenizer: Tokenizer
    renderer: ChatRenderer
    model_config: ModelConfig | None
    """None of a model that embeds or reranks."""
    pooling: PoolingSpec | None
    """None of a model that generates."""
    bundle: bytes
    """The tokenizer for gateways; empty where it cannot be had in that form."""

    @classmethod
    def load(cls, path: str, config: EngineConfig) -> ModelTexts:
        tokenizer = Tokenizer.load(path)
        _ = tokenizer.pieces.longest  # computed over the whole vocabulary on first use: not in a request
        renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
        if (pooling := read_pooling(path, config)) is not None:
            return cls(tokenizer, renderer, None, pooling, _bundle_of(tokenizer))
        return cls(tokenizer, renderer, load_model_config(path), None, _bundle_of(tokenizer))


def _bundle_of(tokenizer: Tokenizer) -> bytes:
    try:
        return encode_bundle(tokenizer)
    except UnsupportedModel as error:
        logger.warning("gateways without model files will match by text: %s", error)
        return b""


class Membership(msgspec.Struct, frozen=True):
    """What another process needs to take part in a running engine (`AsyncEngine.join`)."""

    directory: str
    """Of the core's sockets."""
    client: int
    """The number under which the core knows it."""
    resolved: wire.Resolved
    ready: wire.Ready


@dataclass(slots=True)
class WarmupReport:
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens that were in the cache already."""
    seconds: float


class AsyncEngine:
    """See the module docstring. Attributes: config, tokenizer, renderer, model_config, builder,
    max_model_len, served_name, pooling (of a model that embeds or reranks; it has no model_config, builder,
    tool_format and reasoning), prefix_chain (what block hashes start from; None without prefix caching),
    tokenizer_bundle and tokenizer_digest (for gateways; empty where there is none), tool_format (None where
    the model's is not known), constraints (a plug-in that constrains answers, or None)."""

    def __init__(self, config: EngineConfig) -> None:
        """Use `AsyncEngine.start` or `AsyncEngine.join`."""
        self.config = config
        self.served_name = config.served_name or ""
        self.profile_dir = config.profile_dir
        self.constraints = load_constraint_provider(config.constraint_provider)
        self.prefix_chain: PrefixChain | None = None
        self.max_model_len = 0
        self.tokenizer_bundle = b""
        self.tokenizer_digest = ""
        self.tokenizer: Tokenizer
        self.renderer: ChatRenderer
        self.model_config: ModelConfig
        self.tool_format: ToolFormat | None
        self.builder: RequestBuilder
        self.pooling: PoolingBuilder | None = None
        self._client: CoreLink
        self._streams: Streams
        self._calls: PoolingCalls | None = None
        self._found: tuple[wire.Resolved, wire.Ready]
        self._on_progress: ProgressFn | None = None
        self._on_cache_change: CacheChangeFn | None = None
        self._draining = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: ProgressFn | None = None,
        log_level: str = "warning",
        factory: str = DEFAULT_FACTORY,
        on_cache_change: CacheChangeFn | None = None,
    ) -> AsyncEngine:
        """Spawn the core process, load the model, and return once it takes requests.

        Raises the core's own typed error: ConfigError, ModelNotFound, ModelUnreachable, UnsupportedModel,
        OutOfMemory, Unauthorized, or EngineDead when the process died. `factory` names another core for
        tests. `on_cache_change` hears what enters and leaves the prefix cache, before the tokens of the same
        step.
        """
        config.validate()
        if config.tool_format is not None:
            format_named(config.tool_format)
        self = cls(config)
        self._on_progress = on_progress
        self._on_cache_change = on_cache_change
        client = self._client = await CoreClient.start(
            config,
            on_message=self._on_message,
            factory=factory,
            log_level=log_level,
            cache_events=on_cache_change is not None,
        )
        try:
            resolved = await client.resolved
            # The tokenizer loads while the core loads weights.
            texts = await asyncio.to_thread(ModelTexts.load, resolved.path, config)
            self._set_up(resolved, await client.ready, texts)
        except BaseException:
            await client.stop()
            raise
        return self

    @classmethod
    async def join(cls, config: EngineConfig, member: Membership) -> AsyncEngine:
        """Take part in an engine that another process started with `config`; returns once the core knows
        this process. The other process calls `note_death` when the core is gone: nothing else reports it
        here."""
        self = cls(config)
        self._client = CoreLink(member.directory, member.client, on_message=self._on_message)
        try:
            self._client.listen()
            texts = await asyncio.to_thread(ModelTexts.load, member.resolved.path, config)
            self._set_up(member.resolved, member.ready, texts)
            await self._client.heartbeat()
        except BaseException:
            await self._client.stop()
            raise
        return self

    def _set_up(self, resolved: wire.Resolved, ready: wire.Ready, texts: ModelTexts) -> None:
        config = self.config
        self._found = resolved, ready
        self.served_name = config.served_name or resolved.model_id
        self.max_model_len = ready.max_model_len
        self.tokenizer, self.renderer = texts.tokenizer, texts.renderer
        if texts.bundle:
            self.tokenizer_bundle = texts.bundle
            self.tokenizer_digest = bundle_digest(texts.bundle)
        if texts.pooling is not None:
            self.pooling = PoolingBuilder(config, texts.pooling, texts.tokenizer)
            self._calls = PoolingCalls(self._send_abort)
        else:
            self._set_up_generation(resolved, ready, texts)
        self._client.dead.add_done_callback(self._on_death)
        self._client.watch()

    def _set_up_generation(self, resolved: wire.Resolved, ready: wire.Ready, texts: ModelTexts) -> None:
        config = self.config
        assert texts.model_config is not None
        self.model_config = texts.model_config
        if config.prefix_caching:
            self.prefix_chain = PrefixChain(
                model=resolved.model_id, revision=resolved.revision, block_size=config.block_size
            )
        self.tool_format = (
            format_named(config.tool_format)
            if config.tool_format is not None
            else detect_format(
                self.renderer.source_for(tools=True),
                self.model_config.family,
                shows_tools=self.renderer.shows_tools(),
            )
        )
        form = detect_reasoning(self.renderer.source_for(tools=False), config.reasoning_format)
        self.reasoning = None if form is None else ModelReasoning(form, self.tokenizer)
        self.builder = RequestBuilder(
            config,
            self.model_config,
            self.tokenizer,
            ready.max_model_len,
            ready.num_kv_blocks * config.block_size,
            compile_grammars=False,
        )
        self._streams = Streams(OutputProcessor(self.tokenizer), self._send_abort)

    def attach(self) -> Membership:
        """Return a membership for another process. Only in the process that started the core. Raises
        EngineDead."""
        assert isinstance(self._client, CoreClient)
        return Membership(self._client.directory, self._client.attach(), *self._found)

    def detach(self, client: int) -> None:
        """Have the core drop the requests of a process that is gone."""
        assert isinstance(self._client, CoreClient)
        self._client.detach(client)

    def note_death(self, reason: LeadlineError) -> None:
        """The core is gone; every request ends with `reason`."""
        self._client.note_death(reason)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        **options: Any,
    ) -> AsyncGenerator[OutputDelta, None]:
        """`prepare` (whose options these are) and `run` in one."""
        request = await self.prepare(prompt, sampling, **options)
        async with contextlib.aclosing(self.run(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        priority_class: PriorityClass = "interactive",
        queue_timeout: float | None = None,
        deadline: float | None = None,
        cache_salt: str = "",
        resume_token_ids: Sequence[int] = (),
        client: str = "",
        thought: ThoughtSpec | None = None,
    ) -> CoreRequest:
        """Tokenize and check a request, in a thread where that takes long. Raises RequestError.

        `queue_timeout` and `deadline` are seconds from now. `resume_token_ids` is output that an earlier
        attempt (on another pod, say) already gave out: generation goes on behind it, drawing the same
        numbers given the same seed.
        """
        arrival = time.monotonic()

        def build() -> CoreRequest:
            tokens: str | Sequence[int] = prompt
            if resume_token_ids:
                content = prompt if isinstance(prompt, str) else list(prompt)
                whole = PromptInput(content, add_special_tokens, resume_token_ids)
                tokens = prompt_token_ids(whole, self.tokenizer)
            return self.builder.build(
                tokens,
                sampling,
                add_special_tokens=add_special_tokens,
                request_id=request_id,
                priority_class=priority_class,
                arrival=arrival,
                queue_timeout=queue_timeout,
                deadline=None if deadline is None else arrival + deadline,
                cache_salt=cache_salt,
                num_resumed=len(resume_token_ids),
                client=client,
                thought=thought,
            )

        # A short text tokenizes in about a millisecond, less than the hop to a thread is worth.
        words = sum(map(len, sampling.bad_words))  # texts, or token ids
        if len(prompt) + words > _INLINE_CHARACTERS:
            return await asyncio.to_thread(build)
        return build()

    async def run(
        self, request: CoreRequest, on_delta: DeltaCallback | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of a prepared request's choices as they come, until each has a finish_reason; without those
        that `on_delta` handles while the caller waits in here (see `streams`). The first delta of a resumed
        request is `resumed`.

        Raises QueueFull, QueueTimeout, DeadlineExceeded, RequestError (the core refused it) or EngineDead.
        Closing the iterator, or cancelling the task that waits in it, aborts the request.
        """
        if self._draining:
            raise EngineDead("the engine is shutting down")
        self._client.check_alive()
        stream = self._streams.open(request, on_delta)
        try:
            if stream.children:
                self._client.add(stream.children)
            async with contextlib.aclosing(stream.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._streams.close(stream)

    async def pool(self, request: PoolingRequest) -> CoreOutput:
        """Have a model that embeds or reranks compute a request of `pooling`; returns its output, in which
        `pooled` has the values. Raises as `run`. Cancelling the task aborts the request."""
        assert self._calls is not None, "this model generates"
        if self._draining:
            raise EngineDead("the engine is shutting down")
        self._client.check_alive()
        return await self._calls.call(request, lambda: self._client.add([request]))

    @property
    def task(self) -> Task:
        """What the model is served for."""
        return "generate" if self.pooling is None else self.pooling.spec.task

    @property
    def _requests(self) -> Streams | PoolingCalls:
        """Those in flight."""
        return self._streams if self._calls is None else self._calls

    async def warmup(self, prompts: Sequence[str | Sequence[int]], *, cache_salt: str = "") -> WarmupReport:
        """Compute the KV of prompts (one greedy token each), so that later requests find it cached. Half as
        many run at once as the engine takes."""
        began = time.monotonic()
        gate = asyncio.Semaphore(max(1, self.config.max_concurrent_requests // 2))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)

        async def one(prompt: str | Sequence[int]) -> tuple[int, int]:
            async with gate:
                tokens = cached = 0
                async for delta in self.generate(
                    prompt, sampling, priority_class="batch", cache_salt=cache_salt
                ):
                    tokens, cached = delta.num_prompt_tokens, delta.num_cached_tokens
                return tokens, cached

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            counts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return WarmupReport(
            prompts=len(counts),
            prompt_tokens=sum(tokens for tokens, _ in counts),
            cached_tokens=sum(cached for _, cached in counts),
            seconds=time.monotonic() - began,
        )

    @property
    def dead(self) -> asyncio.Future[LeadlineError]:
        """Resolves with the reason once the core process is gone unasked."""
        return self._client.dead

    @property
    def frozen(self) -> str | None:
        """Why the core process counts as frozen, which a long step is no reason for; None: it does not."""
        return self._client.frozen

    @property
    def core_pid(self) -> int:
        """Only in the process that started the core."""
        assert isinstance(self._client, CoreClient)
        return self._client.pid

    @property
    def num_in_flight(self) -> int:
        """Requests that still have a reader."""
        return len(self._requests)

    def stats(self) -> SchedulerStats:
        """The core's counters as of its last heartbeat (at most a step or half a second old)."""
        stats = self._client.last_stats
        if stats is None:
            raise EngineDead("the engine core has not reported yet")
        return stats

    def speeds(self) -> Speeds:
        """How fast the core computes at present; zeros until measured."""
        return self._client.last_speeds

    def check_ready(self) -> float:
        """Age of the core loop's last heartbeat in seconds. Raises EngineDead when the core is gone or
        leaving."""
        self._client.check_alive()
        return max(0.0, time.monotonic() - self._client.last_heartbeat)

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of blocks dropped."""
        return await self._client.reset_prefix_cache()

    async def profile(self, *, steps: int | None = None, seconds: float | None = None) -> wire.Profiled:
        """Record a torch profiler trace of the core's next `steps` steps, or of so many seconds, into
        `profile_dir`. The answer has a code where there is none: off, one running already, or failed."""
        return await self._client.profile(steps, seconds)

    async def drain(self, seconds: float) -> int:
        """Admit nothing more, wait up to `seconds` for running requests, abort the rest; returns how many."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.idle.wait(), seconds)
        return self._requests.fail_all(EngineDead("the server shut down before the request finished"))

    async def stop(self) -> None:
        """End the core process and every request that is left. Safe to call twice."""
        self._draining = True
        self._requests.fail_all(EngineDead("the engine is shutting down"))
        await self._client.stop()

    def _on_message(self, message: wire.FromCore) -> None:
        match message:
            case wire.Outputs(outputs):
                self._requests.deliver(outputs)
            case wire.CacheChange():
                if self._on_cache_change is not None:
                    self._on_cache_change(message)
            case wire.Rejected():
                self._requests.reject(message)
            case wire.Progress():
                if self._on_progress is not None:
                    self._on_progress(message)

    def _on_death(self, future: asyncio.Future[LeadlineError]) -> None:
        if future.cancelled():
            return
        reason = future.result()
        self._requests.fail_all(EngineDead(f"the engine stopped while serving the request: {reason}"))

    def _send_abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDead):
            self._client.send(wire.Abort(request_ids))
