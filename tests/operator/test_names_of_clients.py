"""Two services with one name: the one that does not get the requests says so."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import condition, deployment, plan_of, pod

from leadline.operator.clients import names_elsewhere


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
