"""From a request to a pod: its prompt's chain, what each pod holds of it, and the policy's choice."""

import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest
from leadline.gateway.proxy.body import Incoming, invalid
from leadline.gateway.services import Service
from leadline.gateway.tokens.approximate import BYTES_PER_TOKEN, ApproximateTokens
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.load import LoadReport

__all__ = ["RoutedPrompt", "choose", "known_prompt", "read_prompt"]


class RoutedPrompt(msgspec.Struct):
    """What routing knows of a prompt."""

    chain: Sequence[int]
    """First 64 bits of each full block's hash; of several prompts, the first one's."""
    tokens: int
    """Of all prompts together; an estimate unless `exact`."""
    exact: bool
    """The chain is the engine's own."""


class _Unreported(msgspec.Struct, frozen=True):
    """Stands in for a load report while no pod has sent one."""

    model: str
    block_size: int
    revision: str = ""
    max_model_len: int = 0

    def namespace(self, *, cache_salt: str = "", adapter: str = "") -> ChainNamespace:
        return ChainNamespace(
            model=self.model, revision="", adapter=adapter, cache_salt=cache_salt, block_size=self.block_size
        )


def known_prompt(service: Service, incoming: Incoming) -> RoutedPrompt | None:
    """The prompt, where nothing must be waited for; else `read_prompt` says it. Raises as that does."""
    tokens, full = service.tokens, incoming.full
    if tokens is None or full is None:
        return None
    if isinstance(tokens, ApproximateTokens):
        prompts = tokens.pieces(full, _identity(service))
        return RoutedPrompt(prompts[0].chain, sum(prompt.num_tokens for prompt in prompts), False)
    prompt = tokens.at_once(full, _identity(service))
    return None if prompt is None else RoutedPrompt(prompt.chain, prompt.num_tokens, True)


def _identity(service: Service) -> LoadReport | _Unreported:
    for pod in service.pods.values():
        if pod.report is not None:
            return pod.report
    return _unreported(service.model, service.block_size)


_unreported = lru_cache(maxsize=64)(_Unreported)


async def read_prompt(service: Service, incoming: Incoming) -> RoutedPrompt:
    """Tokenize, or measure, the prompt. Raises RequestError for what the engine would refuse as well."""
    tokens = service.tokens
    if incoming.full is None:
        if incoming.fault is not None and tokens is not None and not isinstance(tokens, ApproximateTokens):
            raise invalid(incoming.fault)
        return RoutedPrompt((), max(1, len(incoming.body) // BYTES_PER_TOKEN), False)
    if tokens is None:
        return RoutedPrompt((), max(1, len(incoming.body) // BYTES_PER_TOKEN), False)
    identity = _identity(service)
    prompts = await tokens.prompts(incoming.full, identity, max_model_len=identity.max_model_len)
    first = prompts[0]
    total = first.num_tokens if len(prompts) == 1 else sum(prompt.num_tokens for prompt in prompts)
    return RoutedPrompt(first.chain, total, first.ids is not None)


def choose(
    service: Service, incoming: Incoming, prompt: RoutedPrompt, candidates: list[Pod], *, explain: bool
) -> tuple[Decision, int]:
    """The policy's choice among eligible pods, and how many leading blocks that pod holds."""
    now = time.monotonic()
    matched = service.index.match(prompt.chain, now) if prompt.chain else {}
    report = candidates[0].report
    request = RouteRequest(
        now=now,
        prompt_tokens=prompt.tokens,
        max_tokens=incoming.max_tokens,
        matched_blocks=matched,
        block_size=service.block_size if report is None else report.block_size,
        session=incoming.fields.user,
        explain=explain,
    )
    decision = service.policy.pick(request, candidates)
    return decision, matched.get(decision.pod.id, 0)
