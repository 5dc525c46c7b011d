"""Options of the operator: from the command line, from the environment, and the errors of wrong ones."""

from __future__ import annotations

import argparse

import pytest

from leadline.operator.options import add_options, settings_of
from leadline.operator.settings import OperatorSettings
from leadline.protocol.errors import LeadlineError


def settings(*options: str) -> OperatorSettings:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return settings_of(parser.parse_args(options))


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADLINE_OPERATOR_WORKERS", "3")
    monkeypatch.setenv("LEADLINE_OPERATOR_NETWORK_POLICIES", "false")
    assert (settings().workers, settings().network_policies) == (3, False)
    assert settings("--workers=5").workers == 5


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WORKERS", "many", "LEADLINE_OPERATOR_WORKERS must be a number, not 'many'"),
        ("RESYNC_SECONDS", "5m", "LEADLINE_OPERATOR_RESYNC_SECONDS must be a number, not '5m'"),
        ("LEASE_SECONDS", "nan", "lease-seconds must lie between 1 and 86400, not nan"),
        ("LEASE_SECONDS", "inf", "lease-seconds must lie between 1 and 86400, not inf"),
        ("AUTOSCALE_SECONDS", "0", "autoscale-seconds must lie between 0.1 and 86400, not 0"),
        ("WORKERS", "0", "workers must be at least 1, not 0"),
        ("PORT", "70000", "port must lie between 0 and 65535, not 70000"),
        ("GATEWAY_URL", "gw:80", "gateway-url must be http://HOST or https://HOST, not 'gw:80'"),
        ("GATEWAY_LABELS", "app", "gateway-labels must be KEY=VALUE,..., not 'app'"),
        (
            "CPU_REQUESTS",
            "cpu=lots",
            "cpu-requests must be amounts of cpu, memory or ephemeral-storage, such as "
            "cpu=500m,memory=2Gi, not 'cpu=lots'",
        ),
        (
            "GPU_REQUESTS",
            "gpu=1",
            "gpu-requests must be amounts of cpu, memory or ephemeral-storage, such as "
            "cpu=500m,memory=2Gi, not 'gpu=1'",
        ),
        ("ACCELERATOR", "tpu", "accelerator must be gpu or cpu, not 'tpu'"),
    ],
)
def test_a_value_that_cannot_work_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"LEADLINE_OPERATOR_{variable}", value)
    with pytest.raises(LeadlineError) as refused:
        settings()
    assert str(refused.value) == message


def test_what_engines_ask_for_may_be_nothing() -> None:
    given = settings("--cpu-requests=cpu=2,memory=1Gi", "--gpu-requests=")
    assert (given.cpu_requests, given.gpu_requests) == ({"cpu": "2", "memory": "1Gi"}, {})


def test_an_empty_namespace_is_not_all_of_them() -> None:
    with pytest.raises(LeadlineError, match="leave it out to look in all namespaces"):
        settings("--namespace=")
