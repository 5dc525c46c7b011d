"""Settings of publishing: what is refused, and that no password is shown."""

from __future__ import annotations

import pytest

from leadline.engine.errors import ConfigError
from leadline.engine.publisher.publisher import Publisher
from leadline.engine.publisher.settings import PublishSettings, new_epoch, redacted
from leadline.engine.server.settings import ServerSettings


def settings(**changes: str | int | None) -> PublishSettings:
    given: dict[str, str | int | None] = {
        "redis_url": "redis://r:6379/0",
        "service": "ns/llm",
        "host": "127.0.0.1",
        "port": 8000,
        **changes,
    }
    return PublishSettings.of(given.pop("redis_url"), given.pop("service"), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"redis_url": "http://r"}, "redis_url"),
        ({"service": None}, "service"),
        ({"service": "llm"}, "NAMESPACE/NAME"),
        ({"service": "a/b/c"}, "service"),
        ({"service": "ns/"}, "service"),
        ({"host": "0.0.0.0"}, "advertise_address"),
        ({"advertise": "nowhere"}, "advertise_address"),
        ({"advertise": ":8000"}, "advertise_address"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, str | None], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "127.0.0.1:8000"),
        ({"host": "::1"}, "[::1]:8000"),
        ({"host": "0.0.0.0", "advertise": "10.0.0.7:8000"}, "10.0.0.7:8000"),
    ],
)
def test_the_address_is_where_gateways_reach_the_server(changes: dict[str, str], address: str) -> None:
    assert settings(**changes).address == address


def test_every_life_of_a_pod_has_its_own_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_epoch() != new_epoch()
    monkeypatch.setenv("LEADLINE_POD_UID", "uid-1")
    assert new_epoch().startswith("uid-1-")


def test_no_password_is_shown() -> None:
    url = "redis://user:hunter2@r.example:6379/0?password=hunter2"
    assert redacted(url) == "redis://r.example:6379/0"
    assert "hunter2" not in repr(settings(redis_url=url))
    assert "hunter2" not in repr(ServerSettings(redis_url=url))


def test_a_url_that_cannot_be_read_is_refused_without_showing_it() -> None:
    broken = settings(redis_url="redis://:hunter2@r:port/0")
    with pytest.raises(ConfigError, match="redis_url") as caught:
        Publisher(broken, "e")
    assert "hunter2" not in str(caught.value)
