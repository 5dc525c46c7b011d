"""The configuration: what is read, what goes over it, and how it says where it is wrong."""

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest

from leadline.gateway.config.file import ConfigFile, ConfigWatch, read_config
from leadline.gateway.config.options import add_options, config_of
from leadline.gateway.config.settings import split_address
from leadline.gateway.errors import ConfigError
from leadline.gateway.services import build_table

FULL = """
redis_url: redis://:pass@valkey:6379/0
keys_file: /etc/leadline/keys.yaml
policy: least-load
admission: {max_queued: 5, class_weights: {interactive: 8, batch: 1}}
services:
  - name: default/qwen
    model: /models/qwen
    served_names: [Qwen/Qwen3-8B, 模型]
    policy: prefix
    policy_options: {knee: 32}
    pods: ["10.0.0.7:8000", {id: pod-b, address: "[fd00::1]:8000"}]
  - {name: default/next, pod_concurrency: 3, pods: ["h:1"]}
models:
  x: {default/qwen: 90, default/next: 10}
"""


def parsed(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return config_of(parser.parse_args(words))


def test_a_file_is_read_and_services_are_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FULL)
    config = read_config(path, {"admission": {"pod_concurrency": 7}})
    assert config.admission.max_queued == 5, "overrides are merged, not put in place of a section"
    assert [pod.id for pod in config.services[0].pods] == ["", "pod-b"]
    table = build_table(config)
    qwen, following = table.get("default/qwen"), table.get("default/next")
    assert type(qwen.policy).__name__ == "PrefixPolicy"
    assert type(following.policy).__name__ == "LeastLoadPolicy"
    assert (qwen.pod_concurrency, following.pod_concurrency) == (7, 3)
    assert {table.resolve("x").name for _ in range(200)} <= {"default/qwen", "default/next"}


def test_json_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"services": [{"name": "a/b", "pods": ["h:1"]}]}')
    assert read_config(path).services[0].name == "a/b"


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"servces": []}, "servces"),
        ({"server": {"port": "x"}}, "server.port"),
        ({"server": {"port": 70_000}}, "server.port"),
        ({"services": {"name": "a/b"}}, "services"),
        ({"services": ["a/b"]}, "services[0]"),
        ({"services": [{"name": "a/b"}, {"name": "ab"}]}, "services[1].name"),
        ({"services": [{"name": "a/b"}, {"name": "a/b"}]}, "services[1].name"),
        ({"services": [{"name": "a/{b}"}]}, "services[0].name"),
        ({"services": [{"name": "a/b", "block_size": 0}]}, "services[0].block_size"),
        ({"services": [{"name": "a/b", "pods": ["h:1", {"adress": "x"}]}]}, "services[0].pods[1]"),
        ({"services": [{"name": "a/b", "pods": ["h"]}]}, "services[0].pods[0].address"),
        ({"services": [{"name": "a/b", "pods": ["h:1", "h:1"]}]}, "services[0].pods"),
        (
            {"services": [{"name": "a/b", "served_names": ["x"]}, {"name": "a/c", "served_names": ["x"]}]},
            "services[1].served_names",
        ),
        ({"services": [{"name": "a/b"}], "models": {"x": {"a/c": 1}}}, "models['x']"),
        ({"services": [{"name": "a/b"}], "models": {"x": {"a/b": 0}}}, "models['x']"),
        ({"services": [{"name": "a/b"}], "redis_url": "http://x"}, "redis_url"),
        ({"admission": {"class_weights": {"batch": 0}}}, "admission.class_weights"),
        ({}, "services"),
    ],
)
def test_errors_begin_with_the_place(document: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(None, document)
    message = str(refused.value)
    assert message.startswith(place) or f"`{place}`" in message, message


def test_errors_name_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("redis_url: x\nservices: [\n  {name: secret-thing\n")
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert "gateway.yaml line" in str(refused.value)
    assert "secret-thing" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    path.write_text("- a list")
    with pytest.raises(ConfigError, match="mapping"):
        read_config(path)


def test_a_policy_that_cannot_be_made_is_named() -> None:
    for options in ({"policy": "nope"}, {"policy": "prefix", "policy_options": {"knee": -1}}):
        config = read_config(None, {"services": [{"name": "a/b", "pods": ["h:1"], **options}]})
        with pytest.raises(ConfigError, match="service a/b"):
            build_table(config)


def test_options_make_a_service_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADLINE_REDIS_URL", "redis://r:1")
    config = parsed(
        "--service", "ns/m", "--model", "smollm2", "--served-name", "x", "--pod", "a=h:1", "--pod", "[::1]:2"
    )
    assert (config.services[0].name, config.services[0].model) == ("ns/m", "smollm2")
    assert [(pod.id, pod.address) for pod in config.services[0].pods] == [("a", "h:1"), ("", "[::1]:2")]
    assert config.redis_url == "redis://r:1"
    assert parsed("--pod", "h:1").services[0].name == "default/default"
    assert parsed("--kubernetes", "--namespace", "*").discovery.namespace == "*"


def test_options_go_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FULL)
    config = parsed("--config", str(path), "--port", "9", "--redis-url", "unix:///s", "--max-queued", "6")
    assert (config.server.port, config.redis_url, config.admission.max_queued) == (9, "unix:///s", 6)
    assert config.admission.class_weights == {"interactive": 8, "batch": 1}
    with pytest.raises(ConfigError, match="--config"):
        parsed("--config", str(path), "--pod", "h:1")


def test_secrets_are_not_in_a_repr(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FULL + "upstream: {api_key: hush}\n")
    shown = repr(read_config(path))
    assert "pass" not in shown
    assert "hush" not in shown


@pytest.mark.parametrize("address", ["h", "h:", ":1", "h:0", "h:65536", "h:1x", "::1:80", "h:٣", "[]:1"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address, "x")


def test_a_file_that_turns_bad_is_reported_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gateway.yaml"

    def write(text: str) -> None:
        """As the kubelet does it: a new file in place of the old."""
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    good = "services: [{name: ns/a, pods: ['10.0.0.1:8000']}]\n"
    write(good)
    shown: list[bool] = []
    watch = ConfigWatch(ConfigFile(str(file), functools.partial(read_config, str(file))), shown.append)
    watch.poll()
    assert (shown, caplog.messages) == ([], [])
    for text, problem in (
        (good + "polcy: random\n", "polcy"),
        ("services: [", "not YAML"),
        (good + "policy: [1]\n", "policy"),
    ):
        write(text)
        watch.poll()
        watch.poll()
        assert shown.pop() is False
        assert shown == []
        message = caplog.messages[-1]
        assert problem in message
        assert message.startswith("settings: keeping those that run")
    file.unlink()
    watch.poll()
    assert "cannot be read" in caplog.messages[-1]
    assert shown.pop() is False
    caplog.set_level("INFO")
    write(good)
    watch.poll()
    assert shown.pop() is True
    assert "as it runs" in caplog.messages[-1]
    write(good + "policy: random\n")
    watch.poll()
    assert shown.pop() is True
    assert "restart the gateway to apply it" in caplog.messages[-1]
