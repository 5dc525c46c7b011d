"""The namespaces in which the pods of a service name a prompt's blocks, and the prompt's chain in each.

Room: gateway/proxy. Nearly always there is one. While a service is rolled out to another revision of its
model, or to blocks of another size, there are two: the same prompt has another chain on the new pods
(`protocol.chain.ChainNamespace`), and each pod must be asked by its own.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leadline.gateway.pods import Pod
from leadline.gateway.services import Service
from leadline.gateway.tokens.service import PromptTokens, TokenService
from leadline.protocol.load import LoadReport

__all__ = ["NamedPrompt", "chain_on", "matched_by_name", "name_prompt", "reported_namespaces"]

_MAX_NAMESPACES = 4
"""Each costs the hashes of a prompt's new blocks. Pods of yet another are routed to by load."""


class NamedPrompt(NamedTuple):
    """A prompt as the pods of one namespace name it."""

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
