"""Names for clients: the oldest claim keeps a name, whatever is created, edited or restarted later."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from operator_builders import NOW, SETTINGS, condition, deployment, plan_of, pod
from operator_builders import service as made_service

from leadline.operator.controller import Controller
from leadline.operator.kube.kinds import SERVICE
from leadline.operator.planning.observed import Observed
from leadline.operator.planning.plan import plan
from leadline.operator.planning.served_names import NameIndex, Names, Refusal, claimed_names, decide_names
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import Reason

Object = dict[str, Any]


def named(place: str, age: int = 5, *, has: list[str] | None = None, uid: str = "", **spec: Any) -> Object:
    """An InferenceService, created in minute `age`, that the operator has given the names `has`."""
    namespace, _, name = place.partition("/")
    created = f"2026-11-30T12:{age:02}:00Z"
    metadata = {"namespace": namespace, "name": name, "uid": uid or place, "creationTimestamp": created}
    made: Object = {"metadata": metadata, "spec": {"model": "smollm2", **spec}}
    return made if has is None else {**made, "status": {"names": has}}


QWEN = named("team/qwen", aliases=["gpt"])
HAS_GPT: Object = {"status": {"names": ["gpt"]}}
HAS_OWN: Object = {"status": {"names": ["team/qwen"]}}


@pytest.mark.parametrize(
    ("service", "other", "accepted"),
    [
        (QWEN, named("team/other"), ["qwen", "gpt", "team/qwen"]),
        # A namespace that sorts first gains nothing, an older claim does.
        (QWEN, named("a/x", 6, servedName="qwen"), ["qwen", "gpt", "team/qwen"]),
        (QWEN, named("z/x", 4, servedName="qwen"), ["gpt", "team/qwen"]),
        # Created in the same second: the uid decides, the same everywhere.
        (QWEN, named("z/x", uid="a", servedName="qwen"), ["gpt", "team/qwen"]),
        # An older service that takes a name into its aliases later does not get it from its holder.
        (
            named("team/qwen", has=["qwen", "team/qwen"]),
            named("a/x", 1, has=["x", "a/x"], replicas=0, aliases=["qwen"]),
            ["qwen", "team/qwen"],
        ),
        # One that no longer claims a name does not hold it either.
        (QWEN, named("a/x", 6, has=["gpt", "x", "a/x"]), ["qwen", "gpt", "team/qwen"]),
        # NAMESPACE/NAME cannot be taken by an alias, nor by a servedName.
        (
            named("team/qwen", has=["team/qwen"]),
            named("a/x", 1, aliases=["team/qwen"]),
            ["qwen", "team/qwen"],
        ),
        # Two that hold a name (two operators, or a race): the older one.
        (
            named("team/qwen", has=["qwen"]),
            named("a/x", 6, has=["qwen"], aliases=["qwen"]),
            ["qwen", "team/qwen"],
        ),
        (named("team/qwen", has=["qwen"]), named("a/x", 4, has=["qwen"], aliases=["qwen"]), ["team/qwen"]),
    ],
)
def test_a_name_stays_with_its_holder_and_a_free_one_goes_to_the_oldest(
    service: Object, other: Object, accepted: list[str]
) -> None:
    made = decide_names(service, [other])
    assert list(made.accepted) == accepted
    lost = decide_names(other, [service])
    assert not set(made.accepted) & set(lost.accepted), "one name, one service"
    for name in claimed_names(service):
        assert (name in made.accepted) == (name not in made.refused)


def test_every_order_of_arrival_and_every_restart_comes_to_the_same_names() -> None:
    services = [
        named("b/old", 1, servedName="chat"),
        named("a/new", 2, servedName="chat", aliases=["other"]),
        named("a/alias", 3, replicas=0, aliases=["chat", "old", "b/old"]),
        named("c/other", 4, servedName="other"),
    ]
    outcomes = set()
    for order in itertools.permutations(services):
        seen: list[Object] = [dict(one) for one in order]
        for _ in range(2):  # a second operator begins with what the first one wrote
            for one in seen:
                one["status"] = {"names": list(decide_names(one, seen).accepted)}
        outcomes.add(tuple(sorted((one["metadata"]["uid"], *one["status"]["names"]) for one in seen)))
    assert outcomes == {
        (
            ("a/alias", "alias", "old", "a/alias"),
            ("a/new", "other", "a/new"),
            ("b/old", "chat", "b/old"),
            ("c/other", "c/other"),
        )
    }


@pytest.mark.parametrize(
    ("prefixes", "accepted"),
    [
        ({}, ["qwen", "gpt", "team/qwen"]),
        ({"team": ["q"]}, ["qwen", "team/qwen"]),
        ({"team": ["x-", "g"]}, ["gpt", "team/qwen"]),
        ({"*": ["{namespace}-"]}, ["team/qwen"]),
        ({"*": ["x"], "team": [""]}, ["qwen", "gpt", "team/qwen"]),
        ({"other": ["x"]}, ["qwen", "gpt", "team/qwen"]),
    ],
)
def test_a_namespace_may_be_restricted_to_names_that_begin_so(
    prefixes: dict[str, list[str]], accepted: list[str]
) -> None:
    made = decide_names(QWEN, [], prefixes)
    assert list(made.accepted) == accepted
    assert {one.reason for one in made.refused.values()} <= {Reason.NAME_NOT_ALLOWED}


def test_a_name_that_a_service_may_not_have_is_free_for_others() -> None:
    squatter = named("a/x", 1, has=["gpt"], aliases=["gpt"])
    assert "gpt" not in decide_names(QWEN, [squatter]).accepted
    assert "gpt" in decide_names(QWEN, [squatter], {"a": ["a-"]}).accepted
    message = decide_names(squatter, [QWEN], {"a": ["a-", "x"]}).refused["gpt"].message
    assert message == "'gpt' is not allowed in this namespace: names must begin with 'a-' or 'x'"


TAKEN = Names(("team/qwen",), {"qwen": Refusal(Reason.NAME_TAKEN, "'qwen' belongs to a/x")})
ALIAS_TAKEN = Names(("qwen", "team/qwen"), {"gpt": Refusal(Reason.NAME_TAKEN, "'gpt' belongs to a/x")})


def test_a_service_without_its_name_is_not_ready_and_warns_of_the_holder() -> None:
    settings = replace(SETTINGS, gateway_url="http://gateway")
    made = plan_of(settings=settings, children=deployment(), pods=[pod(ready=True)], names=TAKEN)
    why = "'qwen' belongs to a/x: clients reach this service as 'team/qwen'"
    assert (condition(made)["status"], condition(made)["reason"]) == ("False", "NameTaken")
    assert condition(made)["message"] == f"1 of 1 pods serve; {why}"
    assert condition(made, "ModelAvailable")["status"] == "True"
    names = condition(made, "NamesAccepted")
    assert (names["status"], names["reason"], names["message"]) == ("False", "NameTaken", why)
    assert made.status["names"] == ["team/qwen"]
    assert any((one.warning, one.reason, one.message) == (True, "NameTaken", why) for one in made.events)


def test_a_service_without_an_alias_is_ready_and_says_so() -> None:
    made = plan_of(children=deployment(), pods=[pod(ready=True)], names=ALIAS_TAKEN)
    assert condition(made)["status"] == "True"
    assert condition(made, "NamesAccepted")["status"] == "False"
    assert "'gpt' belongs to a/x" in condition(made)["message"]


def test_the_warning_comes_once_and_again_for_another_name() -> None:
    first = plan_of(names=ALIAS_TAKEN)
    assert [one.reason for one in first.events if one.warning] == ["NameTaken"]

    def again(names: Names) -> list[str]:
        seen = Observed(made_service(status=first.status), NOW, names=names)
        return [one.message for one in plan(seen, SETTINGS).events if one.warning]

    assert again(ALIAS_TAKEN) == []
    assert len(again(TAKEN)) == 1


def test_a_service_that_cannot_run_keeps_its_names_and_says_which_it_lacks() -> None:
    made = plan_of({"replicas": "three"}, names=ALIAS_TAKEN)
    assert made.desired is None
    assert made.status["names"] == ["qwen", "team/qwen"]
    assert condition(made, "NamesAccepted")["reason"] == "NameTaken"


def test_the_status_names_the_service_whose_slices_count_and_no_other() -> None:
    def child(owner: str) -> dict[tuple[str, str], Object]:
        owners = [{"uid": owner, "controller": True}]
        labels = {"app.kubernetes.io/managed-by": "leadline-operator"}
        metadata = {"name": "qwen-engine", "uid": "uid-s", "ownerReferences": owners, "labels": labels}
        return {("Service", "qwen-engine"): {"kind": "Service", "metadata": metadata}}

    assert plan_of(children=child("uid-1")).status["serviceUid"] == "uid-s"
    assert "serviceUid" not in plan_of(children=child("uid-2")).status
    assert "serviceUid" not in plan_of().status


def test_claims_know_the_rivals_of_a_name() -> None:
    claims = NameIndex()
    for place in ("a/x", "b/x", "c/y"):
        claims.change(_key(place), named(place))
    assert claims.rivals(("d", "x"), named("d/x")) == {("a", "x"), ("b", "x")}
    assert claims.rivals(("d", "z"), named("d/z", aliases=["a/x"])) == {("a", "x")}
    claims.change(("a", "x"), None)
    assert claims.rivals(("d", "x"), named("d/x")) == {("b", "x")}


def _key(place: str) -> tuple[str, str]:
    namespace, _, name = place.partition("/")
    return namespace, name


async def test_who_shares_a_name_that_a_service_gets_or_gives_up_is_looked_at_at_once() -> None:
    operator, versions = Controller(OperatorSettings()), iter(range(1, 12))

    async def told(place: str) -> set[str]:
        """The services that are looked at for a change of one."""
        operator.changed(_key(place), SERVICE)
        keys = [await operator.queue.take() for _ in range(len(operator.queue))]
        for key in keys:
            operator.queue.done(key)
        return set(map("/".join, keys))

    async def put(place: str, has: list[str] | None = None, **spec: Any) -> set[str]:
        made = named(place, has=has, **spec)
        made["metadata"]["resourceVersion"] = str(next(versions))
        operator.store.put(SERVICE, made)
        return await told(place)

    assert await put("team/qwen", aliases=["gpt"]) == {"team/qwen"}
    assert await put("team/other") == {"team/other"}
    assert await put("a/y", aliases=["gpt"]) == {"a/y", "team/qwen"}
    assert await put("a/y", aliases=["gpt"], replicas=2) == {"a/y"}
    assert await put("a/y", ["gpt"], aliases=["gpt"]) == {"a/y", "team/qwen"}, "it has the name now"
    assert await put("a/y", ["gpt"], aliases=["gpt", "other"]) == {"a/y", "team/other"}
    assert await put("a/y", aliases=["other"]) == {"a/y", "team/qwen"}
    gone = operator.store.service(("a", "y"))
    assert gone is not None
    operator.store.remove(SERVICE, gone)
    assert await told("a/y") == {"a/y", "team/other"}
