"""What EndpointSlices say: conditions, duplicates, ports, families."""

import json
from typing import Any

import msgspec
import pytest
from kube_script import endpoint, slice_of

from leadline.gateway.discovery.pod_set import FoundPod
from leadline.gateway.discovery.slices import EndpointSlice, found_pods


def found(*slices: dict[str, Any], port: str = "http") -> list[FoundPod]:
    return found_pods([msgspec.json.decode(json.dumps(one), type=EndpointSlice) for one in slices], port)


@pytest.mark.parametrize(
    ("conditions", "ready", "terminating"),
    [
        ({"ready": True}, True, False),
        ({"ready": None}, True, False),  # the API: absent means ready
        ({"ready": False}, False, False),
        ({"ready": False, "serving": True, "terminating": True}, False, True),
        ({"ready": False, "serving": False, "terminating": True}, False, True),
        ({"ready": True, "serving": True, "terminating": True}, True, True),  # publishNotReadyAddresses
    ],
)
def test_conditions_mean_what_the_api_says(
    conditions: dict[str, bool | None], ready: bool, terminating: bool
) -> None:
    (pod,) = found(slice_of("s", endpoint("a", **conditions)))
    assert (pod.ready, pod.terminating) == (ready, terminating)


def test_a_pod_is_known_by_its_name_and_uid() -> None:
    (pod,) = found(slice_of("s", endpoint("a", "10.0.0.9", uid="u")))
    assert pod == FoundPod("a", "10.0.0.9:8000", "u", True, False)


def test_several_slices_of_a_service_are_one_set_of_pods() -> None:
    assert [pod.id for pod in found(slice_of("s1", "a", "b"), slice_of("s2", "c"))] == ["a", "b", "c"]


def test_a_dual_stack_pod_is_found_once_by_its_ipv4_address() -> None:
    six = slice_of("s6", endpoint("a", "fd00::1", uid="u"), family="IPv6")
    four = slice_of("s4", endpoint("a", "10.0.0.9", uid="u"))
    assert [pod.address for pod in found(six, four)] == ["10.0.0.9:8000"]
    assert [pod.address for pod in found(six)] == ["[fd00::1]:8000"]


def test_a_pod_in_two_slices_that_disagree_is_taken_carefully() -> None:
    (pod,) = found(
        slice_of("s1", endpoint("a")), slice_of("s2", endpoint("a", ready=False, terminating=True))
    )
    assert (pod.ready, pod.terminating) == (False, True)


def test_of_a_pod_and_its_successor_of_the_same_name_the_one_that_stays_counts() -> None:
    old = endpoint("a-0", "10.0.0.1", uid="old", ready=False, terminating=True)
    new = endpoint("a-0", "10.0.0.2", uid="new")
    for order in ([old, new], [new, old]):
        assert [pod.uid for pod in found(slice_of("s", *order))] == ["new"]


def test_the_port_is_found_by_name_or_number_or_is_the_first() -> None:
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "metrics", "port": 9090},
        {"name": "http", "port": 8000, "protocol": "TCP"},
    ]
    one = slice_of("s", endpoint("a", "10.0.0.9"), ports=ports)
    assert found(one)[0].address == "10.0.0.9:8000"
    assert found(one, port="9090")[0].address == "10.0.0.9:9090"
    assert found(one, port="nope")[0].address == "10.0.0.9:9090"


def test_empty_and_null_fields_are_no_pods() -> None:
    empty = slice_of("s")
    empty["endpoints"] = None
    assert found(empty) == []
    assert found(slice_of("s", "a", ports=[])) == []
    assert found({"metadata": {"name": "s", "namespace": "ns"}}) == []


def test_an_endpoint_without_a_pod_is_known_by_its_address() -> None:
    bare = slice_of("s", {"addresses": ["192.168.1.5"]})
    assert [(pod.id, pod.ready) for pod in found(bare)] == [("192.168.1.5:8000", True)]
