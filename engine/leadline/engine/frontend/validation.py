"""The one place where requests are checked and turned into `CoreRequest`s.

Everything a caller can get wrong that needs the model, the context length or the engine's caps to be seen is
refused here with a RequestError that names the field, the value and what would work. What passes cannot harm
the core: token ids lie within the vocabulary, prompt and output fit the context and the KV pool. Grammars
are compiled here for `LLM` only; a server leaves them to the core, which refuses them in the same words.

Space for output is settled here as well. With `limit = min(max_model_len, tokens the whole KV pool can
hold)`:

    prompt tokens >= limit               400, naming both numbers
    max_tokens absent                    what the model's authors recommend, else all the space that is left
    prompt + max_tokens > limit          cut to the space that is left; the output ends with finish_reason
    "length"
"""

from __future__ import annotations

import logging
import operator
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, get_args

import msgspec

from leadline.engine.config import EngineConfig
from leadline.engine.errors import RequestError
from leadline.engine.frontend.structured import GrammarCompiler, check_length
from leadline.engine.frontend.token_bans import bad_word_ids, check_bans
from leadline.engine.messages import CoreRequest, PriorityClass, ThoughtSpec
from leadline.engine.sampling_params import SamplingParams, typed
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ModelFacts", "RequestBuilder"]

logger = logging.getLogger("leadline.engine.frontend")

_MAX_STOP_STRINGS = 64
_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ModelFacts(Protocol):
    """What validation needs of `models.config.ModelConfig` (which this package cannot import without
    torch)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def generation(self) -> Any:
        """`models.config.GenerationDefaults`: fields are None where generation_config.json says nothing."""


class RequestBuilder:
    """Admits requests to one engine. Safe for threads.

    `pool_tokens`: tokens the whole KV pool can hold (blocks times block size). `compile_grammars`: refuse
    unusable grammars here; False leaves that to the engine core, which compiles each in a process of its
    own.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelFacts,
        tokenizer: Tokenizer,
        max_model_len: int,
        pool_tokens: int,
        *,
        compile_grammars: bool = True,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._recommended = _recommended(model_config.generation)
        self._recommended_tokens = self._recommended.pop("max_tokens", None)
        self.max_model_len = max_model_len
        self.pool_tokens = pool_tokens
        # A tokenizer may have tokens that the model's embedding lacks: a [PAD] added without resizing it.
        self._tokenizer_is_larger = tokenizer.vocab_size > self._vocab_size
        named = dict.fromkeys((*model_config.eos_token_ids, *tokenizer.eos_token_ids))
        self.eos_token_ids = tuple(i for i in named if 0 <= i < self._vocab_size)
        self._grammars: GrammarCompiler | None = None
        if compile_grammars:
            self._grammars = GrammarCompiler(
                tokenizer, vocab_size=self._vocab_size, eos_token_ids=self.eos_token_ids
            )

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams from what a caller gave; None and absent keys take the model's recommended defaults.

        `stop` may be one string; -1 log probabilities are those of the whole vocabulary; keys of `logit_bias`
        may be decimal strings, as in JSON. Raises RequestError for unknown names and wrong types; ranges are
        checked by `build`.
        """
        fields = dict(self._recommended)
        fields.update({name: value for name, value in given.items() if value is not None})
        for name in ("logprobs", "prompt_logprobs"):
            if fields.get(name) == -1:
                fields[name] = self._vocab_size
        unknown = sorted(fields.keys() - set(SamplingParams.__struct_fields__))
        if unknown:
            raise RequestError(f"unknown sampling parameter {unknown[0]!r}", param=unknown[0])
        return typed(fields)

    def build(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        add_special_tokens: bool = True,
        request_id: str | None = None,
        priority_class: str = "interactive",
        arrival: float | None = None,
        queue_timeout: float | None = None,
        deadline: float | None = None,
        cache_salt: str = "",
        num_resumed: int = 0,
        client: str = "",
        thought: ThoughtSpec | None = None,
    ) -> CoreRequest:
        """Check a request and settle what it left open.

        prompt: text (`add_special_tokens=False` for rendered chats) or token ids. Times are seconds of the
        monotonic clock (`arrival`, `deadline`) or seconds (`queue_timeout`; None takes the engine's). The
        result's `sampling.n` may be above 1: `OutputProcessor.add` fans it out. Raises RequestError.
        """
        sampling = sampling.validate()
        token_ids = self._prompt_ids(prompt, add_special_tokens, num_resumed)
        if not 0 <= num_resumed < len(token_ids):
            raise RequestError(
                f"num_resumed must be at least 0 and below the prompt's {len(token_ids)} tokens, got "
                f"{num_resumed}",
                param="resume_token_ids",
            )
        if num_resumed and sampling.n > 1:
            raise RequestError("a resumed request has n = 1", param="n")
        self._check_caps(sampling)
        sampling = _each_once(sampling)
        self._check_vocabulary(sampling)
        if sampling.bad_words:
            words = bad_word_ids(sampling.bad_words, self._tokenizer)
            sampling = msgspec.structs.replace(sampling, bad_words=words)
        check_bans(sampling, (*self.eos_token_ids, *sampling.stop_token_ids), self._vocab_size)
        if sampling.structured is not None:
            if sampling.min_tokens:
                raise RequestError(
                    "min_tokens cannot be combined with structured output: the grammar decides when it "
                    "is complete",
                    param="min_tokens",
                )
            check_length(sampling.structured)
            if self._grammars is not None:
                self._grammars.validate(sampling.structured)
        if priority_class not in get_args(PriorityClass):
            raise RequestError(
                f"priority_class must be one of {', '.join(get_args(PriorityClass))}, got {priority_class!r}",
                param="priority_class",
            )
        if queue_timeout is None:
            queue_timeout = self._config.queue_timeout
        elif not queue_timeout >= 0:
            raise RequestError(
                f"queue_timeout must be at least 0 seconds, got {queue_timeout}", param="queue_timeout"
            )
        max_tokens = self._max_tokens(sampling, len(token_ids) - num_resumed, num_resumed)
        return CoreRequest(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            priority_class=priority_class,  # type: ignore[arg-type]
            arrival=time.monotonic() if arrival is None else arrival,
            queue_timeout=queue_timeout,
            deadline=deadline,
            cache_salt=cache_salt,
            # Where a grammar is complete only EOS may follow, so there EOS ends the output in any case.
            eos_token_ids=() if sampling.ignore_eos and sampling.structured is None else self.eos_token_ids,
            num_resumed=num_resumed,
            client=client,
            thought=thought,
        )

    @property
    def limit(self) -> int:
        """Most tokens one sequence can have, prompt and output together."""
        return min(self.max_model_len, self.pool_tokens)

    def _prompt_ids(
        self, prompt: str | Sequence[int], add_special_tokens: bool, num_resumed: int
    ) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt must not be empty", param="prompt")
            # A token covers at most `longest` bytes, so a text can be refused without tokenizing megabytes.
            # (A normalizer that shrinks text makes this a little early, at many times any sane prompt.)
            at_least = -(-len(prompt) // self._tokenizer.pieces.longest)
            if at_least >= self.limit:
                raise self._too_long(f"at least {at_least}")
            token_ids = self._tokenizer.encode(prompt, add_special_tokens)
            if self._tokenizer_is_larger and token_ids and max(token_ids) >= self._vocab_size:
                raise self._unknown_to_model(max(token_ids))
        else:
            token_ids = self._checked_ids(prompt)
        if not token_ids:
            raise RequestError("the prompt must hold at least one token", param="prompt")
        if len(token_ids) - num_resumed >= self.limit:
            raise self._too_long(str(len(token_ids) - num_resumed))
        return token_ids

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        """Plain ints within the vocabulary; numpy integers are taken, booleans and floats are not."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise RequestError(
                f"a prompt must be text or token ids, got {type(prompt).__name__}", param="prompt"
            )
        token_ids = list(prompt)
        if set(map(type, token_ids)) <= {int} and (
            not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)
        ):
            return token_ids
        for position, given in enumerate(token_ids):
            try:
                token_id = -1 if isinstance(given, bool) else operator.index(given)
            except TypeError:
                token_id = -1
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt[{position}] must be a token id from 0 to {self._vocab_size - 1}, got {given!r}",
                    param="prompt",
                )
            token_ids[position] = token_id
        return token_ids

    def _unknown_to_model(self, token_id: int) -> RequestError:
        return RequestError(
            f"the prompt holds {self._tokenizer.token_str(token_id)!r}, which the tokenizer makes token "
            f"{token_id}, but the model's vocabulary ends at {self._vocab_size - 1}",
            param="prompt",
        )

    def _too_long(self, tokens: str) -> RequestError:
        why = ""
        if self.pool_tokens < self.max_model_len:
            why = f" (the KV pool of this engine holds no more; the model could take {self.max_model_len})"
        # Clients tell this error by how it begins, which is how OpenAI begins it.
        return RequestError(
            f"This model's maximum context length is {self.limit} tokens{why}. However, the prompt has "
            f"{tokens} tokens, and the output needs room too: shorten the prompt to at most {self.limit - 1} "
            "tokens",
            param="prompt",
            code="context_length_exceeded",
        )

    def _max_tokens(self, sampling: SamplingParams, prompt_len: int, num_resumed: int) -> int:
        room = self.limit - prompt_len
        wanted = sampling.max_tokens
        if wanted is None:
            wanted = self._recommended_tokens or room
        max_tokens = min(wanted, room)
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but only {max_tokens} tokens can be generated "
                "after a prompt "
                f"of {prompt_len} (limit {self.limit})",
                param="min_tokens",
            )
        if num_resumed > max_tokens:
            raise RequestError(
                f"the request resumes after {num_resumed} output tokens, but max_tokens is {max_tokens}",
                param="resume_token_ids",
            )
        return max_tokens

    def _check_caps(self, sampling: SamplingParams) -> None:
        if sampling.n > self._config.max_n:
            raise RequestError(f"n must be at most {self._config.max_n}, got {sampling.n}", param="n")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling, name)
            if asked is not None and asked > self._config.max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self._config.max_logprobs}, got {asked}", param=name
                )
        if len(sampling.stop) > _MAX_STOP_STRINGS:
            raise RequestError(
                f"stop must hold at most {_MAX_STOP_STRINGS} strings, got {len(sampling.stop)}", param="stop"
            )

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        named = {"logit_bias": sampling.logit_bias or {}, "stop_token_ids": sampling.stop_token_ids}
        for param, ids in named.items():
            for token_id in ids:
                if not 0 <= token_id < self._vocab_size:
                    raise RequestError(
                        f"{param} names token {token_id}, but the vocabulary of {self._vocab_size} tokens "
                        f"ends at {self._vocab_size - 1}",
                        param=param,
                    )


def _each_once(sampling: SamplingParams) -> SamplingParams:
    """Leave out tokens that a list names again. A list may have millions, and each choice carries its own."""
    allowed, stops = sampling.allowed_token_ids, sampling.stop_token_ids
    if allowed is None and not stops:
        return sampling
    return msgspec.structs.replace(
        sampling,
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        stop_token_ids=tuple(dict.fromkeys(stops)),
    )


def _recommended(file: Any) -> dict[str, Any]:
    """What generation_config.json says, but for values that no request may have. An explicit `do_sample:
    false` means greedy."""
    found = {name: getattr(file, name) for name in _DEFAULTED if getattr(file, name) is not None}
    if file.max_new_tokens is not None:
        found["max_tokens"] = file.max_new_tokens
    if file.do_sample is False:
        found["temperature"] = 0.0
    if isinstance(top_k := found.get("top_k"), int) and top_k < 0:  # some files write "off" as -1
        found["top_k"] = 0
    usable = {}
    for name, value in found.items():
        try:
            typed({name: value}).validate()
        except RequestError as error:
            logger.warning("generation_config.json: %s; ignored", error)
        else:
            usable[name] = value
    return usable
