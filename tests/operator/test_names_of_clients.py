"""Two services with one name: the one that does not get the requests says so."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import condition, deployment, plan_of, pod

from leadline.operator.clients import names_elsewhere
from leadline.operator.kinds import SERVICE
from leadline.operator.main import Operator
from leadline.operator.settings import OperatorSettings


def named(place: str, **spec: Any) -> dict[str, Any]:
    namespace, _, name = place.partition("/")
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"model": "smollm2", **spec}}


QWEN = named("team/qwen", aliases=["gpt", "chat"])


@pytest.mark.parametrize(
    ("others", "elsewhere"),
    [
        ([QWEN], {}),
        ([named("team/other")], {}),
        ([named("team/a", servedName="qwen")], {"qwen": "team/a"}),
        ([named("team/z", servedName="qwen")], {}),
        ([named("a/qwen")], {"qwen": "a/qwen"}),
        (
            [named("b/x", servedName="gpt"), named("a/y", aliases=["gpt", "chat"])],
            {"gpt": "a/y", "chat": "a/y"},
        ),
        ([named("a/gpt", servedName="else")], {}),
    ],
)
def test_the_first_by_namespace_and_name_has_a_name(
    others: list[dict[str, Any]], elsewhere: dict[str, str]
) -> None:
    """As the gateway decides it."""
    assert names_elsewhere(QWEN, others) == elsewhere


def test_a_ready_service_says_which_of_its_names_lead_elsewhere() -> None:
    made = plan_of(children=deployment(), pods=[pod(ready=True)], elsewhere={"gpt": "a/y"})
    assert condition(made)["status"] == "True"
    assert condition(made)["message"] == (
        "1 of 1 pods serve; but 'gpt' leads to a/y, which has the name too: say 'team/qwen', or give one of "
        "the two another servedName"
    )


async def test_who_shares_a_name_that_a_service_gets_or_gives_up_is_looked_at_at_once() -> None:
    operator, versions = Operator(OperatorSettings()), iter(range(1, 9))

    async def told(place: str) -> set[str]:
        """The services that are looked at for a change of one."""
        namespace, _, name = place.partition("/")
        operator.changed((namespace, name), SERVICE)
        keys = [await operator.queue.take() for _ in range(len(operator.queue))]
        for key in keys:
            operator.queue.done(key)
        return set(map("/".join, keys))

    async def put(place: str, **spec: Any) -> set[str]:
        made = named(place, **spec)
        made["metadata"] |= {"resourceVersion": str(next(versions)), "uid": place}
        operator.store.put(SERVICE, made)
        return await told(place)

    assert await put("team/qwen", aliases=["gpt"]) == {"team/qwen"}
    assert await put("team/other") == {"team/other"}
    assert await put("a/y", aliases=["gpt"]) == {"a/y", "team/qwen"}
    assert await put("a/y", aliases=["gpt"], replicas=2) == {"a/y"}
    assert await put("a/y", aliases=["gpt", "other"]) == {"a/y", "team/other"}
    assert await put("a/y", aliases=["other"]) == {"a/y", "team/qwen"}
    gone = operator.store.service(("a", "y"))
    assert gone is not None
    operator.store.remove(SERVICE, gone)
    assert await told("a/y") == {"a/y", "team/other"}
