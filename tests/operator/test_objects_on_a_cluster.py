"""Objects on a real cluster: claims that outlive a cache, objects put right, and objects of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import Cluster, is_ready, operator, service, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_a_cache_that_is_taken_away_leaves_its_claim_and_finds_it_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    def uid() -> str:
        found: str = cluster.get("pvc", "weights-engine")["metadata"]["uid"]
        return found

    def message() -> str:
        return str(cluster.ready("weights").get("message"))

    with operator(cluster, tmp_path) as process:
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi", "storageClass": "standard"}))
        until(lambda: cluster.get("pvc", "weights-engine"), explain=process.text)
        before = uid()
        cluster.apply(service("weights", replicas=0))
        until(lambda: "claim weights-engine (10Mi)" in message(), explain=process.text)
        reasons = [one["reason"] for one in cluster.items("events")]
        assert reasons.count("CacheRetained") == 1
        cluster.apply(service("weights", replicas=0, cache={"size": "9Mi"}))
        until(lambda: "cache.size cannot be had" in message(), explain=process.text)
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi"}))
        until(lambda: message() == "replicas is 0", explain=process.text)
        assert "retainedClaim" not in cluster.get("isvc", "weights")["status"]
        assert uid() == before
        # Asked for beforehand, it goes.
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi", "retain": False}))
        until(
            lambda: cluster.get("pvc", "weights-engine")["metadata"]["annotations"].get(
                "serving.leadline.io/retain"
            ),
            explain=process.text,
        )
        cluster.apply(service("weights", replicas=0))
        until(lambda: cluster.get("pvc", "weights-engine") is None, explain=process.text)


def test_a_change_of_ours_is_put_right_and_a_deleted_child_comes_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("held"))
        until(lambda: is_ready(cluster, "held"), explain=process.text)
        cluster.kubectl("delete", "pdb", "held-engine")
        cluster.kubectl("patch", "svc", "held-engine", "-p", json.dumps({"spec": {"selector": {"x": "y"}}}))
        until(lambda: cluster.get("pdb", "held-engine"), explain=process.text)

        def selector() -> Any:
            return cluster.get("svc", "held-engine")["spec"]["selector"]

        until(lambda: selector().get("serving.leadline.io/service") == "held", explain=process.text)
        # Also where another client's field excludes ours.
        least = {"spec": {"minAvailable": 0, "maxUnavailable": None}}
        cluster.kubectl("patch", "pdb", "held-engine", "--type=merge", "-p", json.dumps(least))
        until(
            lambda: cluster.get("pdb", "held-engine")["spec"].get("maxUnavailable") == 1,
            explain=lambda: (cluster.ready("held"), process.text()),
        )
        assert "minAvailable" not in cluster.get("pdb", "held-engine")["spec"]
        # The labels by which children are watched and found are put back too, when another client removes
        # them.
        for key in ("serving.leadline.io/service", "app.kubernetes.io/managed-by"):
            before = cluster.get("netpol", "held-engine")["metadata"]["labels"]
            cluster.kubectl("label", "netpol", "held-engine", f"{key}-")
            until(
                lambda before=before: cluster.get("netpol", "held-engine")["metadata"]["labels"] == before,
                explain=process.text,
            )


def test_a_service_that_is_made_again_at_once_does_not_trip_over_its_predecessor(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("again"))
        until(lambda: is_ready(cluster, "again"), explain=process.text)
        cluster.kubectl("delete", "isvc", "again")
        cluster.apply(service("again", servedName="second"))
        until(lambda: is_ready(cluster, "again"), explain=process.text)
        uid = cluster.get("isvc", "again")["metadata"]["uid"]
        assert cluster.get("deploy", "again-engine")["metadata"]["ownerReferences"][0]["uid"] == uid
        assert "ApplyRefused" not in process.text()


def test_somebody_elses_object_of_our_name_is_not_taken_over(cluster: Cluster, tmp_path: Path) -> None:
    theirs = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mine-engine"}, "spec": theirs}
    )
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("mine"))
        until(lambda: cluster.ready("mine").get("reason") == "NameTaken", explain=process.text)
        assert "Service mine-engine" in cluster.ready("mine")["message"]
        assert cluster.get("svc", "mine-engine")["spec"]["selector"] == {"app": "theirs"}
        assert cluster.get("deploy", "mine-engine") is None


def test_somebody_elses_secret_of_our_name_is_not_taken_over(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chart of a Redis makes one for a release `mine`. The operator may not read Secrets."""
    monkeypatch.setenv("LEADLINE_REDIS_URL", "redis://:s3cret@redis:6379/0")
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine-redis"}}
    cluster.apply({**theirs, "stringData": {"redis-password": "theirs"}})
    before = cluster.get("secret", "mine-redis")
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("mine"))
        until(lambda: cluster.ready("mine").get("reason") == "NameTaken", explain=process.text)
        assert "Secret mine-redis" in cluster.ready("mine")["message"]
        cluster.kubectl("delete", "isvc", "mine", "--wait=true")
        assert cluster.get("secret", "mine-redis") == before
        # One of ours is written again, however often.
        cluster.apply(service("ours"))
        until(lambda: is_ready(cluster, "ours"), explain=process.text)
        cluster.apply(service("ours", servedName="new"))
        until(
            lambda: "=new" in json.dumps(cluster.get("deploy", "ours-engine")["spec"]), explain=process.text
        )
        until(lambda: is_ready(cluster, "ours"), explain=process.text)
        assert "NameTaken" not in str(cluster.get("isvc", "ours")["status"])
        assert cluster.get("secret", "ours-redis")["metadata"]["ownerReferences"]
        # A deleted one is missed when a pod cannot start without it.
        cluster.kubectl("delete", "secret", "ours-redis")
        cluster.kubectl("delete", "pods", "--all", "--wait=false")
        until(lambda: cluster.get("secret", "ours-redis") is not None, explain=process.text)
