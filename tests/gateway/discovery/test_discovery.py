"""Pods come from static lists and from a watch that survives whatever the API server does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from kube_script import KubeScript, endpoint, kube_script, slice_of
from kubernetes.aio.client import ApiClient, Configuration

from leadline.gateway.config.file import read_config
from leadline.gateway.discovery import reflector
from leadline.gateway.discovery.discovery import Discovery
from leadline.gateway.discovery.kube_api import KubeAccess, find_access
from leadline.gateway.discovery.reflector import Reflector, Timing
from leadline.gateway.discovery.slices import RESOURCE as SLICES
from leadline.gateway.discovery.slices import EndpointSlice
from leadline.gateway.errors import ConfigError, NoPods, UnknownModel
from leadline.gateway.services import ServiceTable, build_table
from leadline.protocol.events import EventBatch
from live_valkey import until

FAST = Timing(resync=60, watch=60, slack=1, first_pause=0.01, longest_pause=0.1)


class Watching:
    """A gateway's discovery against the scripted server."""

    def __init__(self, script: KubeScript, discovery: Discovery, table: ServiceTable) -> None:
        self.script, self.discovery, self.table = script, discovery, table
        self.events: list[tuple[str, str]] = []

    def pods(self, service: str = "ns/llm") -> dict[str, str]:
        found = self.table.get(service)
        if found is None:
            return {}
        return {
            pod.id: "leaving" if pod.terminating else "ready" if pod.ready else "unready"
            for pod in found.pods.values()
        }


@asynccontextmanager
async def watching(
    tmp_path: Path,
    *slices: dict[str, Any],
    timing: Timing = FAST,
    settings: dict[str, Any] | None = None,
    trust: str = "labels",
) -> AsyncIterator[Watching]:
    """`trust`: labels, since what watches go through does not depend on what makes a service."""
    async with kube_script() as script:
        await script.put(*slices)
        kubeconfig = tmp_path / "kubeconfig"
        (tmp_path / "token").write_text("first")
        kubeconfig.write_text(
            f"""
            current-context: c
            contexts: [{{name: c, context: {{cluster: k, user: u, namespace: ns}}}}]
            clusters: [{{name: k, cluster: {{server: "{script.url}"}}}}]
            users: [{{name: u, user: {{tokenFile: token}}}}]
            """
        )
        kube = {"discovery": {"kind": "kubernetes", "kubeconfig": str(kubeconfig), "trust": trust}}
        more = dict(settings or {})
        kube["discovery"] |= more.pop("discovery", {})
        config = read_config(None, {**kube, **more})
        table = build_table(config)
        events: list[tuple[str, str]] = []
        discovery = Discovery(
            config,
            table,
            lambda service: events.append(("changed", service.name)),
            added=lambda service: events.append(("added", service.name)),
            removed=lambda service: events.append(("removed", service.name)),
            timing=timing,
        )
        made = Watching(script, discovery, table)
        made.events = events
        await discovery.start()
        try:
            yield made
        finally:
            await discovery.close()


async def test_static_lists_become_pods() -> None:
    config = read_config(
        None,
        {"services": [{"name": "ns/a", "pods": ["10.0.0.1:8000", {"id": "x", "address": "[::1]:8000"}]}]},
    )
    table = build_table(config)
    changed: list[str] = []
    discovery = Discovery(config, table, lambda service: changed.append(service.name))
    await discovery.start()
    await discovery.close()
    assert {pod.id: pod.address for pod in table.get("ns/a").pods.values()} == {
        "10.0.0.1:8000": "10.0.0.1:8000",
        "x": "[::1]:8000",
    }
    assert changed == ["ns/a"]


async def test_labelled_slices_make_services_that_come_and_go(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a", "b")) as kube:
        assert kube.pods() == {"a": "ready", "b": "ready"}
        await kube.script.put(slice_of("t1", "c", service="other"))
        await until(lambda: kube.pods("ns/other") == {"c": "ready"})
        await kube.script.delete("t1")
        await until(lambda: kube.table.get("ns/other") is None)
        assert ("added", "ns/other") in kube.events
        assert kube.events[-1] == ("removed", "ns/other")
        assert kube.pods() == {"a": "ready", "b": "ready"}


async def test_a_configured_service_finds_its_pods_by_the_name_of_its_kubernetes_service(
    tmp_path: Path,
) -> None:
    settings = {"services": [{"name": "ns/qwen", "kubernetes_service": "backend", "served_names": ["Q/1"]}]}
    plain = slice_of("s1", "a", service="backend", labels={})
    async with watching(tmp_path, plain, settings=settings) as kube:
        await until(lambda: kube.pods("ns/qwen") == {"a": "ready"})
        assert kube.table.resolve("Q/1").pods["a"].ready
        selectors = {one["labelSelector"] for one in kube.script.requests}
        assert "serving.leadline.io/service" in selectors
        assert any("kubernetes.io/service-name in (backend)" in one for one in selectors)
        await kube.script.delete("s1")
        await until(lambda: kube.pods("ns/qwen") == {})
        assert kube.table.get("ns/qwen") is not None, "a configured service stays"


async def test_a_pod_that_terminates_takes_nothing_new_and_is_dropped_when_it_has_gone(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path, slice_of("s1", "a", "b")) as kube:
        pod = kube.table.get("ns/llm").pods["a"]
        await kube.script.put(slice_of("s1", endpoint("a", ready=False, serving=True, terminating=True), "b"))
        await until(lambda: kube.pods() == {"a": "leaving", "b": "ready"})
        assert pod.draining
        await kube.script.put(slice_of("s1", "b"))
        await until(lambda: kube.pods() == {"b": "ready"})


async def test_a_pod_of_the_same_name_and_another_uid_inherits_nothing(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", endpoint("a", "10.0.0.1", uid="one"))) as kube:
        service = kube.table.get("ns/llm")
        old = service.pods["a"]
        now = time.monotonic()
        service.index.heard(now)
        service.index.pod_seen("a", "one-1")
        service.index.batch(EventBatch(epoch="one-1", seq=0, stored=[7]))
        service.index.routed("a", [7, 8], 0, now)
        assert service.index.match([7, 8], now) == {"a": 2}
        with old.lease(prefill_tokens=10, blocks=1, now=now):
            await kube.script.put(slice_of("s1", endpoint("a", "10.0.0.1", uid="two")))
            await until(lambda: service.pods["a"] is not old)
            assert service.pods["a"].in_flight == 0
            assert service.index.match([7, 8], now) == {}
            assert old.draining
        assert old.in_flight == 0


async def test_a_watch_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        for number in range(3):
            await kube.script.drop_connections()
            await kube.script.put(slice_of("s1", "a", f"n{number}"))
            await until(lambda: f"n{number}" in kube.pods())  # noqa: B023
        assert kube.script.lists == 1


async def test_a_watch_that_the_server_ends_is_begun_again_from_the_last_bookmark(tmp_path: Path) -> None:
    timing = Timing(resync=60, watch=1, slack=1, first_pause=0.01)
    async with watching(tmp_path, slice_of("s1", "a"), timing=timing) as kube:
        await until(lambda: kube.script.watches == 1)
        await kube.script.bookmark()
        await until(lambda: kube.script.watches == 2)
        assert kube.script.requests[-1]["resourceVersion"] == str(kube.script.version)
        assert kube.script.requests[-1]["allowWatchBookmarks"] == "true"
        assert kube.script.lists == 1


async def test_watches_that_are_cut_after_a_while_are_begun_again_without_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a proxy that closes every connection after half a minute."""
    now = 0.0
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            raise asyncio.CancelledError

    class Cut(Reflector[EndpointSlice]):
        async def _list(self) -> None:
            self._listed_at = now

        async def _watch(self) -> None:
            nonlocal now
            now += 30
            raise aiohttp.ClientPayloadError("cut")

    monkeypatch.setattr(reflector, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(reflector, "asyncio", SimpleNamespace(sleep=sleep, Event=asyncio.Event))
    client = ApiClient(Configuration(host="http://127.0.0.1"))
    with pytest.raises(asyncio.CancelledError):
        await Cut(client, EndpointSlice, SLICES, "ns", "", lambda gone, come: None).run()
    assert max(pauses) <= Timing().first_pause


async def test_after_an_event_that_cannot_be_read_another_watch_is_begun(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        await kube.script.put(slice_of("s2", "b") | {"endpoints": "none"})
        await until(lambda: kube.script.lists >= 2)
        await kube.script.delete("s2")
        await kube.script.put(slice_of("s1", "a", "c"))
        await until(lambda: kube.pods() == {"a": "ready", "c": "ready"})
        await until(lambda: kube.script.watches >= 2, 5)


async def test_410_gone_leads_to_a_new_list(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        kube.script.lose_events = True
        await kube.script.put(slice_of("s1", "a", "b"))
        kube.script.gone_below = kube.script.version
        await kube.script.drop_connections()
        await until(lambda: kube.pods() == {"a": "ready", "b": "ready"})
        assert kube.script.lists == 2


async def test_a_server_that_always_answers_410_is_not_asked_in_a_tight_loop(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        kube.script.gone_below = 10**9
        await kube.script.drop_connections()
        await until(lambda: kube.script.lists >= 6)
        before, started = kube.script.lists, time.monotonic()
        await until(lambda: kube.script.lists >= before + 4)
        assert time.monotonic() - started > 0.1
        assert kube.pods() == {"a": "ready"}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_api_server_is_watched_again_without_another_list(status: int, tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        kube.script.status = status
        await kube.script.drop_connections()
        seen = len(kube.script.requests)
        await until(lambda: len(kube.script.requests) >= seen + 2)
        watches, kube.script.status = kube.script.watches, 0
        await until(lambda: kube.script.watches > watches)
        await kube.script.put(slice_of("s1", "a", "b"))
        await until(lambda: kube.pods() == {"a": "ready", "b": "ready"})
        assert kube.script.lists == 1


async def test_an_api_server_that_is_away_or_refuses_leaves_the_pods_as_they_are(tmp_path: Path) -> None:
    async with watching(tmp_path, slice_of("s1", "a", "b")) as kube:
        for status in (500, 403, 401, 429):
            kube.script.status = status
            await kube.script.drop_connections()
            seen = len(kube.script.requests)
            await until(lambda: len(kube.script.requests) >= seen + 3)  # noqa: B023
            assert kube.pods() == {"a": "ready", "b": "ready"}
            kube.script.status = 0
            watches = kube.script.watches
            await until(lambda: kube.script.watches > watches)  # noqa: B023
        await kube.script.put(slice_of("s1", "b"))
        await until(lambda: kube.pods() == {"b": "ready"})


async def test_a_list_that_fails_in_the_middle_removes_nobody(tmp_path: Path) -> None:
    timing = Timing(resync=0.2, watch=60, slack=1, first_pause=0.01, longest_pause=0.05)
    slices = [slice_of(f"s{number}", f"p{number}") for number in range(3)]
    async with watching(tmp_path, *slices, timing=timing) as kube:
        assert len(kube.pods()) == 3
        kube.script.page_size, kube.script.lists_fail_on_page = 1, 3
        pages = sum("continue" in one for one in kube.script.requests)
        await until(lambda: sum("continue" in one for one in kube.script.requests) >= pages + 6)
        assert len(kube.pods()) == 3
        kube.script.lists_fail_on_page = 0
        await kube.script.put(slice_of("s9", "p9"))
        await until(lambda: len(kube.pods()) == 4)


async def test_events_that_were_lost_are_made_good_by_the_resync(tmp_path: Path) -> None:
    timing = Timing(resync=0.3, watch=60, slack=1, first_pause=0.01)
    async with watching(tmp_path, slice_of("s1", "a"), slice_of("s2", "b"), timing=timing) as kube:
        kube.script.lose_events = True
        await kube.script.delete("s2")
        await kube.script.put(slice_of("s1", "a", "c"))
        await until(lambda: kube.pods() == {"a": "ready", "c": "ready"})


async def test_a_connection_that_has_died_without_a_word_is_noticed(tmp_path: Path) -> None:
    timing = Timing(resync=60, watch=1, slack=0.2, first_pause=0.01, longest_pause=0.05)
    async with watching(tmp_path, slice_of("s1", "a"), timing=timing) as kube:
        kube.script.silent = True
        await kube.script.drop_connections()
        watches = kube.script.watches
        await until(lambda: kube.script.watches >= watches + 2)
        kube.script.silent = False
        await kube.script.put(slice_of("s1", "a", "b"))
        await until(lambda: kube.pods() == {"a": "ready", "b": "ready"})


async def test_a_token_file_is_read_again_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadline.gateway.discovery.kube_api.REFRESH_SECONDS", 0.0)
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        (tmp_path / "token").write_text("second\n")
        await kube.script.drop_connections()
        await until(lambda: kube.script.tokens[-1] == "Bearer second")
        assert kube.script.tokens[0] == "Bearer first"


async def test_slices_larger_than_a_line_of_aiohttp_are_read(tmp_path: Path) -> None:
    async with watching(tmp_path) as kube:
        many = [endpoint(f"pod-{number}", f"10.0.{number // 250}.{number % 250}") for number in range(1_000)]
        await until(lambda: kube.script.watches == 1)
        await kube.script.put(slice_of("s1", *many))
        await until(lambda: len(kube.pods()) == 1_000)


async def test_an_api_server_that_is_away_at_the_start_does_not_stop_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadline.gateway.discovery.discovery._FIRST_LIST", 0.05)
    async with kube_script() as script:
        script.status = 503
        config = read_config(None, {"discovery": {"kind": "kubernetes", "trust": "labels"}})

        async def access(_: str) -> KubeAccess:
            return KubeAccess(ApiClient(Configuration(host=script.url)), "ns")

        monkeypatch.setattr("leadline.gateway.discovery.kube_api.find_access", access)
        table = build_table(config)
        discovery = Discovery(config, table, timing=FAST)
        await discovery.start()
        with pytest.raises(NoPods) as caught:  # "no such model" would be final for clients
            table.resolve("llm")
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "starting", 1)
        script.status = 0
        await script.put(slice_of("s1", "a"))
        await until(lambda: table.complete)
        assert table.resolve("llm").name == "ns/llm"
        with pytest.raises(UnknownModel):
            table.resolve("other")
        await discovery.close()


async def test_services_outside_the_watched_namespace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not in discovery\.namespace"):
        async with watching(tmp_path, settings={"services": [{"name": "elsewhere/x"}]}):
            pass


async def test_without_credentials_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"discovery\.kubeconfig"):
        await find_access()


BROKEN = {
    "no context": "{}",
    "not a mapping": "[1]",
    "a context that is not there": "{current-context: c, contexts: []}",
    "contexts that are no list": "{current-context: c, contexts: text}",
    "a secret in the wrong place": """
        current-context: c
        contexts: [{name: c, context: {cluster: k, user: u}}]
        clusters: [{name: k, cluster: {server: "http://127.0.0.1:1"}}]
        users: [{name: u, token: hidden}]
    """,
    "a certificate that is none": """
        current-context: c
        contexts: [{name: c, context: {cluster: k, user: u}}]
        clusters: [{name: k, cluster: {server: "https://127.0.0.1:1", certificate-authority-data: aGlkZGVu}}]
        users: [{name: u, user: {token: hidden}}]
    """,
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_kubeconfig_that_cannot_be_used_is_named_without_its_secrets(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "kubeconfig").write_text(BROKEN[case])
    with pytest.raises(ConfigError, match="kubeconfig") as caught:
        await find_access(str(tmp_path / "kubeconfig"))
    assert "hidden" not in str(caught.value)


async def test_a_service_account_is_found_and_its_token_read_again_every_minute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ssl

    from kubernetes.aio.config import incluster_config

    authority = ssl.create_default_context().get_ca_certs(binary_form=True)
    pem = ssl.DER_cert_to_PEM_cert(authority[0]) if authority else ""
    if not pem:
        pytest.fail("this machine has no certificate authorities to borrow one from")
    (tmp_path / "ca.crt").write_text(pem)
    (tmp_path / "namespace").write_text("serving")
    (tmp_path / "token").write_text("one")
    monkeypatch.setattr("leadline.gateway.discovery.kube_api.ACCOUNT", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    access = await find_access()
    configuration = access.client.configuration
    assert (configuration.host, access.namespace) == ("https://[fd00::1]:6443", "serving")
    assert (await configuration.auth_settings())["BearerToken"]["value"] == "bearer one"
    (tmp_path / "token").write_text("two")
    later = datetime.now() + timedelta(seconds=61)
    monkeypatch.setattr(incluster_config.datetime, "datetime", type("L", (datetime,), {"now": lambda: later}))
    assert (await configuration.auth_settings())["BearerToken"]["value"] == "bearer two"


async def test_closing_ends_all_tasks(tmp_path: Path) -> None:
    before = len(asyncio.all_tasks())
    async with watching(tmp_path, slice_of("s1", "a")) as kube:
        await until(lambda: kube.script.watches == 1)
        await kube.discovery.close()
        assert not kube.discovery._tasks
    await until(lambda: len(asyncio.all_tasks()) <= before)


@pytest.mark.parametrize(
    ("operator", "found"),
    [(None, {"ns/ours", "ns/theirs"}), ("", {"ns/ours"}), ("blue", {"ns/theirs"}), ("red", set())],
)
async def test_of_two_releases_each_gateway_serves_what_its_operator_makes(
    tmp_path: Path, operator: str | None, found: set[str]
) -> None:
    blue = {"serving.leadline.io/service": "theirs", "serving.leadline.io/operator": "blue"}
    slices = slice_of("s1", "a", service="ours"), slice_of("t1", "b", service="theirs", labels=blue)
    settings = {} if operator is None else {"discovery": {"operator": operator}}
    async with watching(tmp_path, *slices, settings=settings) as kube:
        assert {service.name for service in kube.table} == found
