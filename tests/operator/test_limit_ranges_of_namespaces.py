"""What a namespace's LimitRanges give to containers that do not ask, read from an API server."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.namespaces import LimitRanges

RANGES = [
    {"spec": {"limits": [{"type": "Container", "default": {"memory": "1Gi"}, "max": {"memory": "2Gi"}}]}},
    {"spec": {"limits": [{"type": "Container", "defaultRequest": {"cpu": "100m"}}]}},
    {
        "spec": {
            "limits": [{"type": "Pod", "max": {"nvidia.com/gpu": "1"}}, {"type": "PersistentVolumeClaim"}]
        }
    },
]


@pytest.mark.parametrize(
    ("status", "items", "found"),
    [(200, RANGES, {"cpu", "memory"}), (200, [], set()), (403, [], set()), (500, [], None)],
)
async def test_the_resources_that_it_gives_are_those_of_containers(
    status: int, items: list[Any], found: set[str] | None
) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"items": items, "metadata": {}}, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = KubeApi(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    ranges = LimitRanges(api)
    try:
        if found is None:
            with pytest.raises(ApiError):
                await ranges.of("team")
            return
        assert await ranges.of("team") == found
        assert await ranges.of("team") == found
        assert asked == ["/api/v1/namespaces/team/limitranges"], "an answer is kept for a while"
    finally:
        await api.close()
        await runner.cleanup()


async def test_namespaces_that_are_no_longer_asked_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        async def list(self, kind: object, namespace: str) -> tuple[list[Any], str]:
            return [], "1"

    monkeypatch.setattr("leadline.operator.kube.namespaces._KEEP_SECONDS", 0.0)
    ranges = LimitRanges(Api())  # type: ignore[arg-type]
    for namespace in ("one", "two"):
        await ranges.of(namespace)
    assert set(ranges._known) == {"two"}
