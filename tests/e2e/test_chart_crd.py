"""The CustomResourceDefinition: upgrades update it, uninstalls keep it, and a second release leaves it to the
first. On a copy of the chart with a group of its own, so that no real service
is touched.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_cluster import CHART, Cluster, Namespace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NOTHING_ELSE = ["--set", "operator.enabled=false,gateway.enabled=false,valkey.enabled=false"]


class Charts:
    """Two versions of the chart: the old one's CRD lacks spec.aliases."""

    def __init__(self, folder: Path, group: str) -> None:
        self.group = group
        self.crd = f"inferenceservices.{group}"
        self.old, self.new = self._copy(folder / "old"), self._copy(folder / "new")
        self._set_version(self.old, "0.0.9")
        document = self._read(self.old)
        spec = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        del spec["properties"]["aliases"]
        rules = "x-kubernetes-validations"
        spec[rules] = [rule for rule in spec[rules] if "aliases" not in rule["rule"]]
        self._write(self.old, document)

    def _copy(self, folder: Path) -> Path:
        shutil.copytree(CHART, folder)
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_text(file.read_text().replace("serving.leadline.io", self.group))
        document = self._read(folder)
        # Short names and categories belong to the first that claims them.
        document["spec"]["names"].pop("shortNames")
        document["spec"]["names"].pop("categories")
        self._write(folder, document)
        return folder

    def _read(self, chart: Path) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((chart / "files" / "crd.yaml").read_text())
        return document

    def _write(self, chart: Path, document: dict[str, Any]) -> None:
        (chart / "files" / "crd.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def _set_version(self, chart: Path, version: str) -> None:
        described = yaml.safe_load((chart / "Chart.yaml").read_text())
        (chart / "Chart.yaml").write_text(yaml.safe_dump({**described, "version": version}))

    def service(self, name: str, **spec: Any) -> str:
        return json.dumps(
            {
                "apiVersion": f"{self.group}/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": name},
                "spec": {"model": "smollm2", **spec},
            }
        )


@pytest.fixture
def charts(cluster: Cluster, tmp_path: Path) -> Iterator[Charts]:
    made = Charts(tmp_path, f"e2e-{uuid.uuid4().hex[:6]}.leadline.io")
    try:
        yield made
    finally:
        cluster.kubectl("delete", "crd", made.crd, "--ignore-not-found", "--timeout=60s")


def helm(namespace: Namespace, verb: str, name: str, chart: Path, *more: str) -> None:
    namespace.cluster.helm(verb, name, str(chart), "-n", namespace.name, "--wait", *NOTHING_ELSE, *more)


def owner(cluster: Cluster, charts: Charts) -> str:
    found = json.loads(cluster.kubectl("get", "crd", charts.crd, "-o", "json"))
    annotations = found["metadata"]["annotations"]
    assert annotations["helm.sh/resource-policy"] == "keep"
    return f"{annotations['meta.helm.sh/release-namespace']}/{annotations['meta.helm.sh/release-name']}"


def test_an_upgrade_takes_the_crd_along_and_an_uninstall_leaves_it_with_its_services(
    cluster: Cluster, charts: Charts
) -> None:
    with cluster.namespace("crd") as one, cluster.namespace("crd") as two:
        helm(one, "install", "first", charts.old)
        established = ("wait", "crd", charts.crd, "--for=condition=Established", "--timeout=30s")
        cluster.kubectl(*established)
        one.kubectl("create", "-f", "-", text=charts.service("before"))
        with pytest.raises(AssertionError, match=r"unknown field.*aliases"):
            one.kubectl("create", "-f", "-", text=charts.service("new", aliases=["x"]))
        kind = charts.crd
        uid = (one.get(kind, "before") or {})["metadata"]["uid"]

        helm(two, "install", "second", charts.new)
        assert owner(cluster, charts) == f"{one.name}/first", "left to the release that brought it"
        notes = cluster.helm("get", "notes", "second", "-n", two.name)
        assert "OLDER" in notes, notes
        assert ".spec.aliases" in notes, "the notes say what is missing"

        helm(one, "upgrade", "first", charts.new)
        one.until(
            "the new field is served",
            lambda: one.kubectl("create", "-f", "-", text=charts.service("new", aliases=["x"]), check=False),
            30,
        )
        assert (one.get(kind, "new") or {})["spec"]["aliases"] == ["x"]
        assert (one.get(kind, "before") or {})["metadata"]["uid"] == uid, "services survive"
        helm(two, "upgrade", "second", charts.new)
        assert "OLDER" not in cluster.helm("get", "notes", "second", "-n", two.name)

        cluster.helm("uninstall", "first", "-n", one.name, "--wait")
        assert (one.get(kind, "before") or {})["metadata"]["uid"] == uid, "they survive that too"

        helm(two, "upgrade", "second", charts.new, "--set", "crds.takeOver=true", "--take-ownership")
        assert owner(cluster, charts) == f"{two.name}/second", "an orphan can be adopted"
        helm(two, "upgrade", "second", charts.new)
        assert charts.crd in cluster.helm("get", "manifest", "second", "-n", two.name), "and stays adopted"
        cluster.helm("uninstall", "second", "-n", two.name, "--wait")
        assert (one.get(kind, "before") or {})["metadata"]["uid"] == uid


def test_who_may_do_nothing_outside_a_namespace_may_install_into_it(cluster: Cluster) -> None:
    values = "namespaced=true,crds.install=false,operator.replicas=0,gateway.replicas=0,valkey.enabled=false"
    with cluster.namespace("team") as team:
        team.kubectl("create", "role", "all", "--verb=*", "--resource=*.*")
        team.kubectl("create", "rolebinding", "all", "--role=all", "--user=team")
        installed = cluster.helm(
            "install", "r", str(CHART), "-n", team.name, "--set", values, "--kube-as-user=team"
        )
        assert "STATUS: deployed" in installed
        cluster.helm("uninstall", "r", "-n", team.name, "--kube-as-user=team")
