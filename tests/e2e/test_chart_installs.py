"""The chart on a real cluster: install, upgrade, uninstall; who reaches what; two releases side by side."""

from __future__ import annotations

import base64
import json
import os

import kubernetes
import pytest
from real_cluster import CHART, Audit, Cluster, Namespace, values_here
from test_operator_rights import asked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONNECT = """
import socket, sys, time
host, port, ends = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((host, port), 2).close()
    except (TimeoutError, ConnectionRefusedError):
        # Policies drop or reject; and where a pod is new, they let it in a second or two later.
        if time.monotonic() < ends:
            time.sleep(0.2)
            continue
        print("no answer")
    else:
        print("reached")
    break
"""
PING = """
import redis, sys, time
ends = time.monotonic() + 20
while True:
    try:
        print(redis.Redis.from_url(sys.argv[1], socket_connect_timeout=2).ping())
        break
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        if isinstance(error, redis.exceptions.AuthenticationError) or time.monotonic() > ends:
            raise
        time.sleep(0.2)
"""


def secret(namespace: Namespace, name: str) -> dict[str, str]:
    found = namespace.get("secret", name)
    assert found is not None
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def assert_rights_are_those_used(namespace: Namespace, account: str) -> None:
    """The gateway's ClusterRole against the API server's audit log, where there is one
    (test_operator_rights.py says how): every right is used and none is missing."""
    role = json.loads(
        namespace.cluster.kubectl("get", "clusterrole", f"{namespace.name}:{account}", "-o", "json")
    )
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    user = f"system:serviceaccount:{namespace.name}:{account}"
    for group, resource, verb in granted:
        asked_for = f"{resource}.{group}" if group else resource
        can = namespace.cluster.kubectl("auth", "can-i", verb, asked_for, "--all-namespaces", f"--as={user}")
        assert can.strip() == "yes", (verb, asked_for)
    if os.environ.get("LEADLINE_E2E_AUDIT_LOG"):
        used, forbidden = asked(Audit(user))
        assert not forbidden, "rights that are missing"
        assert used == granted, "each right is used, and no other"


def assert_those_who_may_edit_a_namespace_may_make_services_in_it(namespace: Namespace) -> None:
    """By the cluster's own roles; who may only view sees them."""
    for role, user in (("edit", "editor"), ("view", "viewer")):
        namespace.kubectl("create", "rolebinding", f"{user}s", f"--clusterrole={role}", f"--user={user}")

    def may(user: str, verb: str, subresource: str = "") -> bool:
        asked_for = ["auth", "can-i", verb, "inferenceservices.serving.leadline.io", f"--as={user}"]
        more = [f"--subresource={subresource}"] if subresource else []
        return namespace.kubectl(*asked_for, *more, check=False).strip() == "yes"

    namespace.until("the roles are aggregated", lambda: may("editor", "create") and may("viewer", "list"), 30)
    assert may("editor", "update", "scale")
    assert not may("editor", "patch", "status")
    assert not may("viewer", "create")
    assert not may("somebody", "list")


def pod_address(namespace: Namespace, selector: str) -> str:
    return str(namespace.items("pods", selector)[0]["status"]["podIP"])


def test_a_release_installs_upgrades_answers_its_test_and_leaves_nothing(cluster: Cluster) -> None:
    with cluster.namespace("chart") as namespace:
        with namespace.release(
            "r", values_here(gateway={"replicas": 2}, operator={"replicas": 2})
        ) as seconds:
            print(f"installed and ready in {seconds:.1f} s")
            before = secret(namespace, "r-leadline-redis")
            assert {len(password) for password in before.values()} == {32}
            assert before.keys() == {"gateway-password", "operator-password"}
            cluster.helm("test", "r", "-n", namespace.name, "--timeout", "60s")
            assert_those_who_may_edit_a_namespace_may_make_services_in_it(namespace)

            namespace.helm("upgrade", "r", values=values_here(gateway={"workers": 2}))
            assert secret(namespace, "r-leadline-redis") == before, "an upgrade keeps the password"
            assert (namespace.get("deployment", "r-leadline-gateway") or {})["spec"]["replicas"] == 1
            assert namespace.get("pdb", "r-leadline-gateway") is None, "objects no longer wanted go"
            cluster.helm("test", "r", "-n", namespace.name, "--timeout", "60s")

            autoscaling = {"enabled": True, "minReplicas": 2, "maxReplicas": 3}
            namespace.helm("upgrade", "r", values=values_here(gateway={"autoscaling": autoscaling}))

            def replicas() -> int:
                return int((namespace.get("deployment", "r-leadline-gateway") or {})["spec"]["replicas"])

            namespace.until("the autoscaler has its way", lambda: replicas() == 2, 60)
            assert namespace.get("pdb", "r-leadline-gateway") is not None
            assert_rights_are_those_used(namespace, "r-leadline-gateway")
        kinds = "deploy,rs,pod,svc,endpointslices,sa,cm,secret,netpol,pdb,hpa,role,rolebinding"
        kinds += ",clusterrole,clusterrolebinding"
        label = "app.kubernetes.io/instance=r,app.kubernetes.io/part-of=leadline"
        gone = namespace.until(
            "nothing of the release is left", lambda: not namespace.items(kinds, label), 60
        )
        print(f"gone {gone:.1f} s after the uninstall")
        assert gone < 28, "some process does not end on SIGTERM and was killed after its 30 s"
        assert cluster.kubectl("get", "crd", "inferenceservices.serving.leadline.io"), (
            "services outlive a release"
        )


def would_install(namespace: Namespace, *values: str) -> str:
    """Return helm's output about a second release, which is not made."""
    words = ("install", "second", str(CHART), "-n", namespace.name, "--dry-run=server")
    return namespace.cluster.helm(*words, *(word for value in values for word in ("--set", value)))


def refusal(namespace: Namespace, release: str = "r") -> str:
    return f"the release {release} in the namespace {namespace.name} looks after the same services"


def second_release_is_refused(namespace: Namespace) -> None:
    """Two operators that act on the same services would undo each other's work, and pods roll without end."""
    for values in ((), ("namespaced=true",)):
        with pytest.raises(AssertionError, match=refusal(namespace)):
            would_install(namespace, *values)
    for values in (
        ("operator.name=blue",),
        ("namespaced=true", "operator.name=blue"),
        ("operator.enabled=false",),
    ):
        assert "STATUS: pending-install" in would_install(namespace, *values)


def test_valkey_answers_whom_it_must_and_nobody_else(cluster: Cluster) -> None:
    with cluster.namespace("chart") as namespace, namespace.release("r", values_here()):
        second_release_is_refused(namespace)
        host, passwords = "r-leadline-valkey", secret(namespace, "r-leadline-redis")
        place = f"{host}.{namespace.name}.svc:6379/0"
        url = f"redis://gateway:{passwords['gateway-password']}@{place}"
        engine = {"serving.leadline.io/service": "x"}
        assert namespace.python("engine", PING, url, labels=engine).strip() == "True"
        with pytest.raises(AssertionError, match=r"(?i)auth"):
            namespace.python("guess", PING, f"redis://{host}:6379/0", labels=engine)
        assert namespace.python("stranger", CONNECT, host, "6379", "5").strip() == "no answer"
        with cluster.namespace("other") as other:
            full = f"{host}.{namespace.name}.svc"
            assert other.python("engine", PING, url, labels=engine).strip() == "True"
            assert other.python("stranger", CONNECT, full, "6379", "5").strip() == "no answer"
            assert other.python(
                "client", CONNECT, f"r-leadline-gateway.{namespace.name}.svc", "80", "20"
            ).strip() == ("reached")


def test_two_namespaced_releases_do_not_see_each_others_services(cluster: Cluster) -> None:
    with cluster.namespace("one") as one, cluster.namespace("two") as two:
        mine = values_here(namespaced=True, valkey={"enabled": False})
        with one.release("r", mine), two.release("r", mine):
            with pytest.raises(AssertionError, match=refusal(one)):
                would_install(one, "namespaced=true")
            with pytest.raises(AssertionError, match=r"the release r in the namespace \S+ looks after"):
                would_install(one)
            for namespace in (one, two):
                service = {
                    "apiVersion": "serving.leadline.io/v1alpha1",
                    "kind": "InferenceService",
                    "metadata": {"name": "m"},
                    "spec": {"model": "smollm2", "replicas": 0},
                }
                namespace.kubectl("create", "-f", "-", text=json.dumps(service))
            for namespace in (one, two):
                namespace.until(
                    "its own operator takes it up",
                    lambda namespace=namespace: (
                        (namespace.get("isvc", "m") or {}).get("status", {}).get("url")
                    ),
                    60,
                )
                made = namespace.get("deployment", "m-engine")
                assert made is not None
                url = (namespace.get("isvc", "m") or {})["status"]["url"]
                assert namespace.name in url, "the gateway of its own release"
                log = namespace.kubectl("logs", "deployment/r-leadline-operator")
                assert "forbidden" not in log.lower(), log
                for other in {one.name, two.name} - {namespace.name}:
                    assert other not in log


def test_settings_stay_while_a_replicaset_that_began_with_them_has_pods(cluster: Cluster) -> None:
    """A node that is lost in the middle of a rollout makes new pods of the old ReplicaSet."""
    with cluster.namespace("settings") as namespace:

        def release(verb: str, policy: str, replicas: int = 1) -> set[str]:
            """Names of the ConfigMaps with settings afterwards. No rollout ends: there is no such image."""
            cluster.helm(
                *(verb, "r", str(CHART), "-n", namespace.name, f"--set=gateway.config.policy={policy}"),
                "--set=operator.enabled=false,valkey.enabled=false,crds.install=false,namespaced=true",
                "--set=gateway.image.repository=local/nothing,gateway.image.pullPolicy=Never",
                f"--set=gateway.replicas={replicas}",
            )
            found = json.loads(namespace.kubectl("get", "configmaps", "-o", "json"))["items"]
            names = {one["metadata"]["name"] for one in found}
            return {name for name in names if name.startswith("r-leadline-gateway-")}

        def used() -> set[str]:
            """By ReplicaSets with pods."""
            items = json.loads(namespace.kubectl("get", "replicasets", "-o", "json"))["items"]
            volumes = [
                volume
                for one in items
                if one["spec"]["replicas"]
                for volume in one["spec"]["template"]["spec"]["volumes"]
            ]
            return {one["configMap"]["name"] for one in volumes if one["name"] == "config"}

        first = release("install", "prefix")
        namespace.until("the first ReplicaSet has a pod", lambda: used() == first, 30)
        both = release("upgrade", "random")
        assert (len(first), len(both)) == (1, 2)
        assert first < both
        namespace.until("the second has one too", lambda: used() == both, 30)
        release("upgrade", "random", replicas=0)
        namespace.until("no ReplicaSet has a pod", lambda: not used(), 30)
        assert release("upgrade", "random") == both - first, "no pod uses the first settings any more"
        wrong = "--set=gateway.config.polcy=x"
        with pytest.raises(AssertionError, match="polcy"):
            cluster.helm("upgrade", "r", str(CHART), "-n", namespace.name, wrong)


HIDDEN = "aGlkZGVuLXZhbHVl"


def account_of(user: str) -> kubernetes.client.CoreV1Api:
    """Requests as this user."""
    api = kubernetes.config.new_client_from_config(os.environ["KUBECONFIG"])
    api.set_default_header("Impersonate-User", user)
    return kubernetes.client.CoreV1Api(api)


def test_the_operators_account_neither_changes_nor_reads_secrets_of_others(cluster: Cluster) -> None:
    """By the right to patch alone it could do both: the answer to a patch is the whole object."""
    with (
        cluster.namespace("system") as system,
        cluster.namespace("llm") as namespace,
        system.release("r", values_here(gateway={"enabled": False}), serves=(namespace,)),
    ):
        small = {
            "apiVersion": "serving.leadline.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "m"},
            "spec": {"model": "smollm2", "replicas": 0},
        }
        namespace.kubectl("create", "secret", "generic", "m-redis", f"--from-literal=theirs={HIDDEN}")
        before = namespace.get("secret", "m-redis")
        api = account_of(f"system:serviceaccount:{system.name}:r-leadline-operator")
        for request in (
            lambda: api.patch_namespaced_secret(
                "m-redis", namespace.name, {"metadata": {"labels": {"a": "b"}}}
            ),
            lambda: api.patch_namespaced_secret("m-redis", namespace.name, {}, dry_run="All"),
            lambda: api.create_namespaced_secret(namespace.name, {"metadata": {"name": "new"}}),
        ):
            with pytest.raises(kubernetes.client.ApiException, match="InferenceService") as refused:
                request()
            assert HIDDEN not in str(refused.value.body)
        namespace.kubectl("apply", "-f", "-", text=json.dumps(small))

        def reason() -> str:
            conditions = (namespace.get("isvc", "m") or {}).get("status", {}).get("conditions", [])
            return next((one["reason"] for one in conditions if one["type"] == "Ready"), "")

        namespace.until("the Secret is in the way", lambda: reason() == "NameTaken", 60)
        assert namespace.get("secret", "m-redis") == before
        namespace.kubectl("delete", "secret", "m-redis")
        namespace.until("the operator makes its own", lambda: namespace.get("secret", "m-redis"), 90)
