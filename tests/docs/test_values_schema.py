"""The chart's values.schema.json has every setting of the gateway, so that helm refuses a misspelled one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leadline.gateway.config.settings import GatewayConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "charts"))

import values_schema  # noqa: E402

SCHEMA: dict[str, Any] = values_schema.settings_schema()


def test_the_file_is_what_the_settings_say() -> None:
    assert values_schema.FILE.read_text() == values_schema.text(), "run: python charts/values_schema.py"


def test_every_setting_is_in_it_and_no_other_is_allowed() -> None:
    def check(kind: type[msgspec.Struct], schema: dict[str, Any]) -> None:
        assert schema["additionalProperties"] is False
        fields = msgspec.structs.fields(kind)
        assert set(schema["properties"]) == {field.name for field in fields}
        for field in fields:
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                check(field.type, schema["properties"][field.name])

    check(GatewayConfig, SCHEMA)
    assert "$ref" not in json.dumps(SCHEMA), "older versions of helm do not follow all of them"


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (("policy",), {"type": "string", "minLength": 1}),
        (("admission", "max_queued"), {"type": "integer", "minimum": 0}),
        (("discovery", "trust"), {"enum": ["inferenceservices", "labels"]}),
        (("upstream", "connect_timeout_seconds"), {"type": "number", "exclusiveMinimum": 0}),
    ],
)
def test_limits_of_settings_are_those_of_the_code(path: tuple[str, ...], rule: dict[str, Any]) -> None:
    found = SCHEMA
    for name in path:
        found = found["properties"][name]
    assert found == rule
