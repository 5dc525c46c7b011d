"""The chart without a cluster: what it renders, refuses and keeps equal to what it was made from.

helm is needed, on PATH or beside the kubeconfig: where there is no cluster, only the CRD's copy is compared.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_cluster import CHART, ROOT, Cluster

EVERYTHING = {
    "gateway": {
        "replicas": 3,
        "keysSecret": "keys",
        "config": {"policy": "least-load"},
        "ingress": {"enabled": True, "hosts": ["llm.example.org"], "tlsSecret": "tls", "className": "nginx"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.org"]},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "podDisruptionBudget": {"maxUnavailable": "34%"},
        "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/ca/ca.crt"}],
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
    },
    "operator": {"replicas": 2, "affinity": {"nodeAffinity": {}}},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "commonLabels": {"team": "llm"},
    "commonAnnotations": {"note": "x"},
    "imagePullSecrets": ["registry"],
}
MODES = {
    "defaults": {},
    "namespaced": {"namespaced": True},
    "everything": EVERYTHING,
    "external": {"valkey": {"enabled": False}, "externalRedis": {"url": "rediss://:p@redis:6379/0"}},
    "external host": {
        "valkey": {"enabled": False},
        "externalRedis": {"host": "redis", "tls": True, "passwordSecret": {"name": "mine"}},
    },
    "password of one's own": {
        "valkey": {"existingSecret": "mine", "existingSecretKeys": {"gateway": "g", "operator": "o"}}
    },
    "external with users": {
        "valkey": {"enabled": False},
        "externalRedis": {"existingSecret": "mine", "adminSecret": {"name": "admin"}},
    },
    "external with one user": {
        "valkey": {"enabled": False},
        "externalRedis": {"existingSecret": "mine", "enginesSecret": {"name": "engines"}},
    },
    "autoscaled": {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 3}}},
    "existing secret": {"valkey": {"enabled": False}, "externalRedis": {"existingSecret": "mine"}},
    "no redis": {"valkey": {"enabled": False}},
    "gateway only": {"operator": {"enabled": False}, "crds": {"install": False}},
}


def test_the_charts_crd_is_the_one_made_from_the_types() -> None:
    made, copied = (ROOT / "manifests" / "crd.yaml").read_text(), (CHART / "files" / "crd.yaml").read_text()
    assert made == copied, "run `make manifests`"


@pytest.mark.cluster
def test_the_plain_manifests_are_those_of_the_chart(cluster: Cluster) -> None:
    text = (ROOT / "manifests" / "leadline.yaml").read_text()
    assert cluster.tool(sys.executable, str(ROOT / "manifests" / "render.py"), "--print") == text, (
        "run `make manifests`"
    )
    built = [one for one in yaml.safe_load_all(cluster.kubectl("kustomize", str(ROOT / "manifests"))) if one]
    kinds = {one["kind"] for one in built}
    assert kinds >= {"CustomResourceDefinition", "Namespace", "Secret", "Deployment", "NetworkPolicy"}
    assert {one["metadata"].get("namespace", "leadline-system") for one in built} == {"leadline-system"}


def render(
    cluster: Cluster, folder: Path, values: dict[str, Any], name: str = "r", chart: Path = CHART
) -> list[dict[str, Any]]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    text = cluster.helm("template", name, str(chart), "--namespace", "system", "--values", str(file))
    return [document for document in yaml.safe_load_all(text) if document]


def pods(documents: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(name, pod spec) of everything that makes pods."""
    found = []
    for document in documents:
        if document["kind"] in ("Deployment", "Job"):
            found.append((document["metadata"]["name"], document["spec"]["template"]["spec"]))
        elif document["kind"] == "Pod":
            found.append((document["metadata"]["name"], document["spec"]))
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_lints_and_renders_restricted_pods(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(MODES[mode]))
    cluster.helm("lint", "--strict", "--values", str(file), str(CHART))
    documents = render(cluster, tmp_path, MODES[mode])
    assert documents
    for name, spec in pods(documents):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["requests"], name
            assert container["resources"]["limits"]["memory"], name
    seen = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(seen) == len(set(seen)), "two objects of one name"
    if mode != "gateway only":
        assert any(kind == "CustomResourceDefinition" for kind, _ in seen)


@pytest.mark.cluster
def test_the_namespaced_mode_asks_for_no_right_outside_its_namespace(
    cluster: Cluster, tmp_path: Path
) -> None:
    documents = render(cluster, tmp_path, MODES["namespaced"])
    assert not [one for one in documents if one["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    everywhere = {
        one["metadata"].get("namespace") for one in documents if one["kind"] != "CustomResourceDefinition"
    }
    assert everywhere == {"system"}


@pytest.mark.cluster
def test_no_role_has_a_wildcard_and_none_reads_secrets(cluster: Cluster, tmp_path: Path) -> None:
    for document in render(cluster, tmp_path, {}):
        for rule in document.get("rules", []) if "Role" in document["kind"] else []:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], document["metadata"][
                "name"
            ]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("mode", "gateway", "operator"),
    [
        ("defaults", {"r-leadline-redis/gateway-password"}, {"r-leadline-redis/operator-password"}),
        ("password of one's own", {"mine/g"}, {"mine/o"}),
        ("external with users", {"mine/url"}, {"admin/url"}),
        ("external with one user", {"mine/url"}, {"engines/url"}),
        ("existing secret", {"mine/url"}, {"mine/url"}),
        ("no redis", set(), set()),
    ],
)
def test_each_part_is_given_its_own_user_of_redis(
    cluster: Cluster, tmp_path: Path, mode: str, gateway: set[str], operator: set[str]
) -> None:
    def given(name: str) -> set[str]:
        (spec,) = [spec for one, spec in pods(documents) if one == f"r-leadline-{name}"]
        named = [
            one["valueFrom"]["secretKeyRef"]
            for one in spec["containers"][0].get("env", [])
            if "valueFrom" in one
        ]
        return {f"{one['name']}/{one['key']}" for one in named}

    documents = render(cluster, tmp_path, MODES[mode])
    assert given("gateway") == gateway
    assert given("operator") == operator


@pytest.mark.cluster
def test_the_sentence_of_the_admission_policy_is_the_one_that_the_operator_knows(
    cluster: Cluster, tmp_path: Path
) -> None:
    from leadline.operator.kube.api import _ANOTHER_OWNER

    (policy,) = [one for one in render(cluster, tmp_path, {}) if one["kind"] == "ValidatingAdmissionPolicy"]
    assert _ANOTHER_OWNER in policy["spec"]["validations"][0]["message"]
    assert not [one for one in render(cluster, tmp_path, {"namespaced": True}) if "Admission" in one["kind"]]


@pytest.mark.cluster
def test_other_settings_are_another_configmap(cluster: Cluster, tmp_path: Path) -> None:
    """So that new pods of an older ReplicaSet find the settings that they began with."""

    def mounted(values: dict[str, Any]) -> str:
        documents = render(cluster, tmp_path, values)
        (spec,) = [spec for one, spec in pods(documents) if one == "r-leadline-gateway"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "config"]
        name = str(volume["configMap"]["name"])
        assert named(documents, "ConfigMap", name)["immutable"] is True
        return name

    first = mounted({})
    assert first.startswith("r-leadline-gateway-")
    assert mounted({"gateway": {"logLevel": "debug"}, "operator": {"replicas": 2}}) == first
    assert mounted({"gateway": {"config": {"policy": "least-load"}}}) != first


@pytest.mark.cluster
def test_the_gateways_metrics_are_not_published_with_its_api(cluster: Cluster, tmp_path: Path) -> None:
    """They name services and their traffic."""
    values = {
        "podMonitor": {"enabled": True},
        "networkPolicy": {"monitoringNamespace": "monitoring"},
        "gateway": {
            "ingress": {"enabled": True, "hosts": ["llm.example.com"]},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        },
    }
    documents = render(cluster, tmp_path, values)
    name = "r-leadline-gateway"
    assert [port["name"] for port in named(documents, "Service", name)["spec"]["ports"]] == ["http"]
    ingress = json.dumps(named(documents, "Ingress", name)["spec"])
    route = json.dumps(named(documents, "HTTPRoute", name)["spec"])
    assert "metrics" not in ingress + route
    assert '"name": "http"' in ingress
    (spec,) = [spec for one, spec in pods(documents) if one == name]
    ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
    config = yaml.safe_load(settings_file(documents))
    assert ports == {"http": config["server"]["port"], "metrics": config["server"]["metrics_port"]}
    assert named(documents, "PodMonitor", name)["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    api, metrics = named(documents, "NetworkPolicy", name)["spec"]["ingress"]
    assert (api["ports"][0]["port"], "from" in api) == ("http", False)
    assert metrics["ports"][0]["port"] == "metrics"
    operator, monitoring = metrics["from"]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert monitoring["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


@pytest.mark.cluster
def test_two_releases_share_no_name_but_that_of_the_crd(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (
        {(one["kind"], one["metadata"]["name"]) for one in render(cluster, tmp_path, {}, name)}
        for name in ("first", "second")
    )
    assert {kind for kind, _ in first & second} == {"CustomResourceDefinition"}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replicas": "three"}}, "replicas"),
        ({"gateway": {"service": {"type": "Nodeport"}}}, "service/type"),
        ({"engine": {"accelerator": "tpu"}}, "accelerator"),
        ({"externalRedis": {"url": "redis://x:6379"}}, "set valkey.enabled to false"),
        ({"externalRedis": {"host": "x"}}, "externalRedis.host is set, but valkey.enabled is true"),
        (
            {"valkey": {"enabled": False}, "externalRedis": {"host": "x", "existingSecret": "y"}},
            "set one of externalRedis.existingSecret, externalRedis.host, not 2",
        ),
        ({"valkey": {"passwords": {"gateway": "x"}, "existingSecret": "y"}}, "not both"),
        (
            {
                "valkey": {"enabled": False},
                "externalRedis": {
                    "url": "redis://x:6379",
                    "adminSecret": {"name": "a"},
                    "enginesSecret": {"name": "b"},
                },
            },
            "one user for all engines.*not both",
        ),
        (
            {"valkey": {"enabled": False}, "externalRedis": {"adminSecret": {"name": "a"}}},
            "for the gateway",
        ),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 11}}}, "must not be greater"),
        ({"gateway": {"ingress": {"enabled": True}}}, "must name a host"),
        ({"gateway": {"service": {"ipFamilyPolicy": "DualStack"}}}, "ipFamilyPolicy"),
        ({"gateway": {"config": {"server": {"port": 9000}}}}, "set gateway.service.port"),
        ({"gateway": {"config": {"server": {"metrics_port": 1}}}}, "metrics_port is the chart's"),
        ({"gateway": {"config": {"polcy": "x"}}}, "/gateway/config.*polcy"),
        ({"gateway": {"config": {"admission": {"max_queued": -1}}}}, "admission/max_queued"),
        ({"gateway": {"config": {"services": [{"pods": ["a:1"]}]}}}, "services/0.*name"),
        ({"gateway": {"config": {"upstream": {"retries": "two"}}}}, "upstream/retries"),
        # As in a values file whose lines below a name are comments.
        ({"engine": None}, "missing property 'engine'"),
        ({"gateway": {"image": {"repository": None}}}, "missing property 'repository'"),
    ],
)
def test_wrong_values_are_refused_with_a_sentence(
    cluster: Cluster, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        render(cluster, tmp_path, values)


@pytest.mark.cluster
def test_a_map_that_a_values_file_leaves_empty_is_an_empty_one(cluster: Cluster, tmp_path: Path) -> None:
    empty = {
        "commonLabels": None,
        "commonAnnotations": None,
        "gateway": {"config": None, "podLabels": None},
        "dashboards": {"enabled": True, "annotations": None},
        "prometheusRule": {"enabled": True, "additionalGroups": None},
    }
    on = {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}
    assert named(render(cluster, tmp_path, empty), "Deployment", "r-leadline-gateway") == named(
        render(cluster, tmp_path, on), "Deployment", "r-leadline-gateway"
    )


@pytest.mark.cluster
def test_the_gateways_service_takes_the_addresses_that_are_asked_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    service = {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    made = named(
        render(cluster, tmp_path, {"gateway": {"service": service}}), "Service", "r-leadline-gateway"
    )
    assert made["spec"].items() >= service.items()
    assert (
        "ipFamilyPolicy" not in named(render(cluster, tmp_path, {}), "Service", "r-leadline-gateway")["spec"]
    )


def settings_file(documents: list[dict[str, Any]]) -> str:
    """The gateway's settings, out of the one ConfigMap with them."""
    (made,) = [one for one in documents if one["kind"] == "ConfigMap" and "gateway.yaml" in one["data"]]
    return str(made["data"]["gateway.yaml"])


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    found = [one for one in documents if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


@pytest.mark.cluster
def test_what_users_set_for_the_gateways_pods_is_in_them(cluster: Cluster, tmp_path: Path) -> None:
    documents = render(cluster, tmp_path, EVERYTHING)
    template = named(documents, "Deployment", "r-leadline-gateway")["spec"]["template"]
    labels, annotations, spec = (
        template["metadata"]["labels"],
        template["metadata"]["annotations"],
        template["spec"],
    )
    assert (labels["c"], labels["team"], annotations["a"], annotations["note"]) == ("d", "llm", "b", "x")
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "zone"
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["nodeSelector"], spec["tolerations"][0]["key"]) == ({"pool": "cpu"}, "a")
    (container,) = spec["containers"]
    assert {"name": "ca", "mountPath": "/etc/ca"} in container["volumeMounts"]
    assert {"name": "ca", "secret": {"secretName": "ca"}} in spec["volumes"]
    assert {"name": "SSL_CERT_FILE", "value": "/etc/ca/ca.crt"} in container["env"]
    budget = named(documents, "PodDisruptionBudget", "r-leadline-gateway")["spec"]
    assert budget["maxUnavailable"] == "34%"
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    no_user = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    open_shift = render(cluster, tmp_path, {"gateway": {"podSecurityContext": no_user}})
    pod = named(open_shift, "Deployment", "r-leadline-gateway")["spec"]["template"]["spec"]
    assert set(pod["securityContext"]) == {"runAsNonRoot", "seccompProfile"}, "as OpenShift wants it"


def keys_that_stand_twice(node: yaml.Node | None) -> list[str]:
    """Of the maps in a document. Loaders keep the last of them, other tools refuse the document."""
    if isinstance(node, yaml.SequenceNode):
        return [key for item in node.value for key in keys_that_stand_twice(item)]
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [str(key.value) for key, _ in node.value]
    inner = [key for _, value in node.value for key in keys_that_stand_twice(value)]
    return [name for name in names if names.count(name) > 1] + inner


@pytest.mark.cluster
def test_users_labels_go_where_they_belong_and_never_over_what_selectors_go_by(
    cluster: Cluster, tmp_path: Path
) -> None:
    found_by = {"release": "prometheus", "team": "watchers"}
    file = tmp_path / "values.json"
    values = {
        "commonLabels": {
            "team": "llm",
            "app.kubernetes.io/part-of": "platform",
            "app.kubernetes.io/name": "x",
        },
        "commonAnnotations": {"note": "x"},
        "gateway": {"podLabels": {"team": "gateways", "app.kubernetes.io/component": "x"}},
        "podMonitor": {"enabled": True, "labels": found_by},
        "prometheusRule": {"enabled": True, "labels": found_by},
        "dashboards": {"enabled": True, "labels": found_by},
    }
    file.write_text(json.dumps(values))
    text = cluster.helm("template", "r", str(CHART), "--values", str(file))
    assert [key for node in yaml.compose_all(text) for key in keys_that_stand_twice(node)] == []
    documents = [document for document in yaml.safe_load_all(text) if document]
    for document in documents:
        metadata = document["metadata"]
        labels = metadata.get("labels", {})
        if document["kind"] in ("PodMonitor", "PrometheusRule") or "-dashboard-" in metadata["name"]:
            assert labels.items() >= found_by.items(), metadata
            assert not found_by.keys() & metadata["annotations"].keys()
        elif document["kind"] != "CustomResourceDefinition":
            assert labels["team"] == "llm", metadata
            assert labels["app.kubernetes.io/part-of"] == "platform"
        if document["kind"] == "Deployment":
            in_pods = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"].items() <= in_pods.items()
            teams = {"gateway": "gateways"}
            assert in_pods["team"] == teams.get(in_pods["app.kubernetes.io/component"], "llm")


@pytest.mark.cluster
def test_a_new_version_of_the_chart_replaces_no_pod_whose_image_stays(
    cluster: Cluster, tmp_path: Path
) -> None:
    next_chart = tmp_path / "next"
    shutil.copytree(CHART, next_chart)
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (next_chart / "Chart.yaml").write_text(
        yaml.safe_dump({**described, "version": "9.9.9", "appVersion": "9"})
    )
    kept = {"image": {"tag": "kept"}}
    values = {"gateway": kept, "operator": kept, "engine": {**kept, "cpuImage": {"tag": "kept"}}}
    before, after = (render(cluster, tmp_path, values, chart=chart) for chart in (CHART, next_chart))
    assert before != after, "labels of objects say the version"
    templates = [
        [one["spec"]["template"] for one in documents if one["kind"] == "Deployment"]
        for documents in (before, after)
    ]
    assert templates[0] == templates[1]
    assert len(templates[0]) == 3


@pytest.mark.cluster
def test_an_autoscaled_gateway_leaves_its_replicas_to_the_autoscaler(
    cluster: Cluster, tmp_path: Path
) -> None:
    documents = render(cluster, tmp_path, MODES["autoscaled"])
    scaler = named(documents, "HorizontalPodAutoscaler", "r-leadline-gateway")["spec"]
    deployment = named(documents, "Deployment", "r-leadline-gateway")
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 10)
    assert "replicas" not in deployment["spec"]
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert named(documents, "PodDisruptionBudget", "r-leadline-gateway")
    config = yaml.safe_load(settings_file(documents))
    assert config["limits"]["replicas"] == 10, "a tenth of each limit, where there is no Redis to count in"
    assert config["server"]["host"] == "::", "pods have addresses of IPv4, IPv6 or both"


@pytest.mark.cluster
def test_routes_lead_to_the_gateways_service(cluster: Cluster, tmp_path: Path) -> None:
    parents = [{"name": "public", "namespace": "infra", "sectionName": "https"}]
    route_values = {**EVERYTHING["gateway"], "httpRoute": {"enabled": True, "parentRefs": parents}}
    documents = render(cluster, tmp_path, {"gateway": route_values})
    service = named(documents, "Service", "r-leadline-gateway")
    (port,) = service["spec"]["ports"]

    ingress = named(documents, "Ingress", "r-leadline-gateway")["spec"]
    assert ingress["ingressClassName"] == "nginx"
    assert ingress["tls"] == [{"secretName": "tls", "hosts": ["llm.example.org"]}]
    (path,) = ingress["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}

    # The fields are those of gateway.networking.k8s.io/v1; durations as GEP-2257 has them.
    route = named(documents, "HTTPRoute", "r-leadline-gateway")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "rules"}, "no host names: those of the Gateway"
    assert route["spec"]["parentRefs"] == parents
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": port["port"]}]
    assert rule["timeouts"] == {"request": "0s"}, "0s is no limit: streams are long"


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["", "blue"])
def test_a_gateway_looks_at_the_services_of_its_releases_operator(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    documents = render(cluster, tmp_path, {"operator": {"name": name}})
    config = yaml.safe_load(settings_file(documents))
    assert config["discovery"]["operator"] == name
    (operator,) = named(documents, "Deployment", "r-leadline-operator")["spec"]["template"]["spec"][
        "containers"
    ]
    assert (f"--operator-name={name}" in operator["args"]) == bool(name)
