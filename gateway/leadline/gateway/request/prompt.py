"""From a request to a pod: its prompt's chain, what each pod holds of it, and the policy's choice."""

import time
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest
from leadline.gateway.request.body import Incoming, invalid
from leadline.gateway.services import Service
from leadline.gateway.tokens.approximate import BYTES_PER_TOKEN, ApproximateTokens
from leadline.gateway.tokens.service import PromptTokens, TokenService
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.load import LoadReport
from leadline.protocol.openai.service import TokenizeRequest

__all__ = [
    "NamedPrompt",
    "RoutedPrompt",
    "chain_on",
    "choose",
    "expected_tokens",
    "known_prompt",
    "matched_by_name",
    "name_prompt",
    "read_prompt",
    "reported_namespaces",
]


_MAX_NAMESPACES = 4
"""Each costs the hashes of a prompt's new blocks. Pods of yet another are routed to by load."""


class NamedPrompt(NamedTuple):
    """A prompt's chain in one namespace of block hashes.

    While a service is rolled out to another revision of its model, or to blocks of another size, there are
    two namespaces: the same prompt has another chain on the new pods (`protocol.chain.ChainNamespace`), and
    each pod is matched by its own.
    """

    report: LoadReport
    """Of one of them."""
    chain: Sequence[int]


def reported_namespaces(service: Service) -> Sequence[LoadReport]:
    """One report for each namespace, that of the first pod which has sent one first; empty if none has.

    Looked for anew with each heartbeat of that pod."""
    for pod in service.pods.values():
        report = pod.report
        if report is not None:
            held = service.namespaces
            if not held or held[0] is not report:
                held = service.namespaces = _distinct(report, service.pods.values())
            return held
    return ()


def _distinct(first: LoadReport, pods: Iterable[Pod]) -> list[LoadReport]:
    """`first`, and one for each further namespace among pods that take requests."""
    found = [first]
    for pod in pods:
        report = pod.report
        if report is None or not pod.ready or pod.draining:
            continue
        if len(found) < _MAX_NAMESPACES and not any(_is_alike(one, report) for one in found):
            found.append(report)
    return found


def _is_alike(one: LoadReport, other: LoadReport) -> bool:
    """Whether two pods name blocks alike."""
    return (one.model, one.revision, one.block_size) == (other.model, other.revision, other.block_size)


def name_prompt(
    tokens: TokenService, prompt: PromptTokens, reports: Sequence[LoadReport], salt: str
) -> list[NamedPrompt]:
    """The prompt in each namespace; its own chain is in the first."""
    others = [NamedPrompt(report, tokens.chain(prompt, report, cache_salt=salt)) for report in reports[1:]]
    return [NamedPrompt(reports[0], prompt.chain), *others]


def chain_on(pod: Pod, names: Sequence[NamedPrompt]) -> Sequence[int]:
    """The chain by which this pod knows the prompt; one that has not reported yet gets the first."""
    report = pod.report
    if report is not None:
        for name in names:
            if _is_alike(name.report, report):
                return name.chain
    return names[0].chain


def matched_by_name(
    service: Service, names: Sequence[NamedPrompt], block_size: int, now: float
) -> dict[str, int]:
    """Leading blocks that each pod holds, as `ServiceIndex.match`, whatever it calls them; counted in blocks
    of `block_size` tokens."""
    matched: dict[str, int] = {}
    for name in names:
        for pod, depth in service.index.match(name.chain, now).items():
            matched[pod] = max(matched.get(pod, 0), depth * name.report.block_size // block_size)
    return matched


_MOST_OUTPUT = 1 << 20
"""Tokens that the output of one request counts as, at most. A number without bound would put its whole class
behind the other for as long as any request waits."""


class RoutedPrompt(msgspec.Struct):
    """What routing knows of a prompt."""

    chain: Sequence[int]
    """First 64 bits of each full block's hash; of several prompts, the first one's."""
    tokens: int
    """Of all prompts together; an estimate unless `exact`."""
    exact: bool
    """The chain is the engine's own."""
    ids: "array[int] | None" = None
    """Of a request that asks for them."""
    names: Sequence[NamedPrompt] = ()
    """The chain in each namespace that pods have; empty where they have one."""


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
    if tokens is None or full is None or service.task != "generate":
        return None
    reports = reported_namespaces(service)
    identity = reports[0] if reports else _unreported(service.model, service.block_size)
    if isinstance(tokens, ApproximateTokens):
        # What it makes means nothing to any pod: one namespace will do.
        prompts = tokens.pieces(full, identity)
        return RoutedPrompt(prompts[0].chain, sum(prompt.num_tokens for prompt in prompts), False)
    prompt = tokens.at_once(full, identity)
    if prompt is None:
        return None
    found = RoutedPrompt(prompt.chain, prompt.num_tokens, True)
    if len(reports) > 1:
        found.names = name_prompt(tokens, prompt, reports, _salt(incoming))
    return found


def _salt(incoming: Incoming) -> str:
    return getattr(incoming.full, "cache_salt", None) or ""


_unreported = lru_cache(maxsize=64)(_Unreported)


async def read_prompt(service: Service, incoming: Incoming) -> RoutedPrompt:
    """Tokenize, or measure, the prompt. Raises RequestError for what the engine would refuse as well."""
    tokens = service.tokens
    asks_for_ids = isinstance(incoming.full, TokenizeRequest)
    if service.task != "generate" and not asks_for_ids:
        # Such a model has no prompts: its pods are chosen by load, and answer other requests themselves.
        return RoutedPrompt((), max(1, len(incoming.body) // BYTES_PER_TOKEN), False)
    if incoming.full is None:
        if incoming.fault is not None and tokens is not None and not isinstance(tokens, ApproximateTokens):
            raise invalid(incoming.fault)
        return RoutedPrompt((), max(1, len(incoming.body) // BYTES_PER_TOKEN), False)
    if tokens is None:
        return RoutedPrompt((), max(1, len(incoming.body) // BYTES_PER_TOKEN), False)
    reports = reported_namespaces(service)
    identity = reports[0] if reports else _unreported(service.model, service.block_size)
    prompts = await tokens.prompts(incoming.full, identity, max_model_len=identity.max_model_len)
    first = prompts[0]
    total = first.num_tokens if len(prompts) == 1 else sum(prompt.num_tokens for prompt in prompts)
    found = RoutedPrompt(first.chain, total, first.ids is not None)
    if asks_for_ids:
        found.ids = first.ids
    if len(reports) > 1 and not isinstance(tokens, ApproximateTokens):
        found.names = name_prompt(tokens, first, reports, _salt(incoming))
    return found


def expected_tokens(service: Service, incoming: Incoming, prompt: RoutedPrompt) -> int:
    """Return about how many tokens a request takes, prompt and output. Engines end an output at the end of
    the context, so a larger `max_tokens` counts as the context."""
    reports = reported_namespaces(service)
    context = (reports[0].max_model_len if reports else 0) or _MOST_OUTPUT
    output = min(incoming.max_tokens or 0, context) * incoming.choices
    return max(1, prompt.tokens + min(output, _MOST_OUTPUT))


def choose(
    service: Service, incoming: Incoming, prompt: RoutedPrompt, candidates: list[Pod], *, explain: bool
) -> tuple[Decision, Sequence[int], int]:
    """The policy's choice among eligible pods, the prompt's chain there, and how many leading blocks of it
    that pod holds."""
    now = time.monotonic()
    report = candidates[0].report
    block_size = service.block_size if report is None else report.block_size
    if prompt.names:
        matched = matched_by_name(service, prompt.names, block_size, now)
    else:
        matched = service.index.match(prompt.chain, now) if prompt.chain else {}
    request = RouteRequest(
        now=now,
        prompt_tokens=prompt.tokens,
        max_tokens=incoming.max_tokens,
        matched_blocks=matched,
        block_size=block_size,
        session=incoming.session,
        explain=explain,
    )
    decision = service.policy.pick(request, candidates)
    if not prompt.names:
        return decision, prompt.chain, matched.get(decision.pod.id, 0)
    chain = chain_on(decision.pod, prompt.names)
    return decision, chain, service.index.match(chain, now).get(decision.pod.id, 0)
