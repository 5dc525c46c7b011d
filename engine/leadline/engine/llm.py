"""Offline use: prompts in, finished texts out, in input order.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is", [1, 2, 3]], max_tokens=20, temperature=0):
        print(output.outputs[0].text)
    llm.close()

The engine core runs in this process and in the caller's thread; nothing happens between calls. As a context
manager an `LLM` closes itself.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.errors import EngineDead, EngineError, QueueFull, RequestError
from leadline.engine.frontend.collector import OutputCollector
from leadline.engine.frontend.output_processor import OutputProcessor
from leadline.engine.frontend.validation import RequestBuilder
from leadline.engine.hub import resolve_model
from leadline.engine.messages import CoreRequest
from leadline.engine.outputs import OutputDelta, RequestOutput
from leadline.engine.pooling.spec import check_supported
from leadline.engine.sampling_params import SamplingParams
from leadline.engine.system.garbage import calm_garbage_collector
from leadline.engine.system.progress import progress_bar
from leadline.engine.wire import error_from_kind
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """One model, loaded and ready. Not safe for threads."""

    def __init__(self, model: str, *, progress: bool = True, **settings: Any) -> None:
        """Load `model` (smollm2, hf://org/name, file:///path or a path); `settings` are EngineConfig's
        fields. Unlike a server, it does not bound the time of steps that compute prompts (prefill_step_ms).

        Raises ConfigError, ModelNotFound, ModelUnreachable, Unauthorized, UnsupportedModel, OutOfMemory.
        """
        # No client waits for single tokens here: steps compute as many prompt tokens as they can.
        settings.setdefault("prefill_step_ms", 0.0)
        self.config = EngineConfig(model=model, **settings).validate()
        local = resolve_model(
            model, download_dir=self.config.download_dir, progress=progress, check=check_supported
        )
        self.tokenizer = Tokenizer.load(local.path)
        self._core: EngineCore | None = EngineCore(self.config, local, progress=progress)
        self.chat_renderer = ChatRenderer(self.tokenizer.chat_templates, self.tokenizer.special_tokens)
        self._builder = RequestBuilder(
            self.config,
            self.core.model_config,
            self.tokenizer,
            self.core.max_model_len,
            self.core.num_kv_blocks * self.config.block_size,
        )
        self._processor = OutputProcessor(self.tokenizer)
        self._next_id = 0

    @property
    def core(self) -> EngineCore:
        """What computes. Raises EngineDead after `close`."""
        if self._core is None:
            raise EngineDead("the engine has been closed")
        return self._core

    def close(self) -> None:
        """Give the device's memory back, and end the processes of further ranks.

        Closing again does nothing; other calls raise EngineDead then.
        """
        import torch

        if self._core is None:
            return
        end_ranks = getattr(self._core.runner, "close", None)
        if end_ranks is not None:
            end_ranks()
        self._core = None
        # The core kept itself from the collector when it was built, and it holds reference cycles.
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self.core.max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self._builder.sampling_params({})

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: strings or token ids, one or many. Results come in input order.

        sampling_params: one for all, or one a prompt; None takes the model's recommended defaults.
        max_tokens and temperature override it. Without max_tokens a sequence may run to the context limit.
        Raises RequestError before anything runs if one of the requests cannot be served, EngineError if the
        engine fails in between.
        """
        return self._run(_as_list(prompts), sampling_params, max_tokens, temperature, use_tqdm, True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template. Else as `generate`.

        chat_template_kwargs: further variables for the template, such as enable_thinking. With
        continue_final_message the last message stays open and the answer continues it.
        """
        if isinstance(messages, Mapping):
            raise RequestError("messages must be a list, even of one message", param="messages")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [
            self.chat_renderer.render(
                conversation,
                tools=tools,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, max_tokens, temperature, use_tqdm, False)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks were dropped."""
        return self.core.reset_prefix_cache()

    # -- inside ----------------------------------------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params,
        max_tokens: int | None,
        temperature: float | None,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params, len(prompts), max_tokens, temperature)
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            self._next_id += 1
            requests.append(
                self._builder.build(
                    prompt, one, add_special_tokens=add_special_tokens, request_id=f"llm-{self._next_id}"
                )
            )
        with calm_garbage_collector():
            return self._complete(prompts, requests, use_tqdm)

    def _params(
        self, given: Params, count: int, max_tokens: int | None, temperature: float | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        each = [given] * count if isinstance(given, SamplingParams) else list(given)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, one or a list, got {type(given).__name__} "
                    f"of {type(one).__name__}",
                    param="sampling_params",
                )
        if len(each) != count:
            raise RequestError(
                f"there are {count} prompts and {len(each)} sampling_params; give one, or one a prompt",
                param="sampling_params",
            )
        changes: dict[str, Any] = {}
        if max_tokens is not None:
            changes["max_tokens"] = max_tokens
        if temperature is not None:
            changes["temperature"] = temperature
        return [msgspec.structs.replace(one, **changes) for one in each] if changes else each

    def _complete(
        self, prompts: Sequence[Prompt], requests: list[CoreRequest], use_tqdm: bool
    ) -> list[RequestOutput]:
        collectors = {
            request.request_id: OutputCollector(
                request.request_id,
                prompt if isinstance(prompt, str) else None,
                request.prompt_token_ids,
                request.sampling.n,
            )
            for prompt, request in zip(prompts, requests, strict=True)
        }
        pending = deque(requests)
        ready: deque[CoreRequest] = deque()
        bar = progress_bar(shown=use_tqdm, total=len(requests), desc="requests", unit="req")
        started, tokens = time.monotonic(), 0
        try:
            while pending or ready or self.core.has_work():
                self._feed(pending, ready)
                for output in self.core.step():
                    tokens += len(output.new_token_ids)
                    deltas, aborts = self._processor.process(output)
                    for child in aborts:
                        self.core.abort(child)
                    for delta in deltas:
                        if collectors[delta.request_id].add(delta):
                            rate = tokens / (time.monotonic() - started)
                            bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
                            bar.update()
        except BaseException:
            self._abandon(requests)
            raise
        finally:
            bar.close()
        for collector in collectors.values():
            if collector.error is not None:
                if (failure := collector.error.failure) is not None:
                    raise error_from_kind(
                        failure.kind, failure.message, param=failure.param, code=failure.code
                    )
                raise EngineError(_describe(collector.error))
        return [collectors[request.request_id].result() for request in requests]

    def _feed(self, pending: deque[CoreRequest], ready: deque[CoreRequest]) -> None:
        """Give the core as many sequences as it takes. `ready` holds those of a request that did not all
        fit."""
        try:
            while pending or ready:
                if not ready:
                    ready.extend(self._processor.add(pending.popleft()))
                while ready:
                    self.core.add_request(ready[0])
                    ready.popleft()
        except QueueFull:
            if not self.core.has_work():
                raise

    def _abandon(self, requests: list[CoreRequest]) -> None:
        """Leave nothing behind in the core after an interruption."""
        for request in requests:
            for child in self._processor.abort(request.request_id):
                self.core.abort(child)
        while self.core.has_work():
            self.core.step()


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt (a string, or a sequence of ids) or many, in whatever holds them → many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be text, token ids or several of them, got {type(prompts).__name__}",
            param="prompts",
        )
    many: list[Any] = list(prompts)
    return [many] if many and _is_number(many[0]) else many


def _is_number(value: object) -> bool:
    """An integer of Python's or numpy's; of torch's those without dimensions."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _describe(delta: OutputDelta) -> str:
    if delta.error is not None:
        return delta.error
    what = {"queue_timeout": "waited longer than its queue timeout", "deadline": "passed its deadline"}
    return f"request {delta.request_id} {what.get(delta.finish_reason or '', 'failed')}"
