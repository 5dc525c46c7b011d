"""The device that a model runs on; a GPU that is too old is refused by name."""

from __future__ import annotations

import pytest
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.runner.shard import resolve_device


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_before_hopper_are_refused_by_name(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    config = EngineConfig(model="m", device="auto")
    if capability >= (9, 0):
        assert resolve_device(config) == torch.device("cuda", 0)
        return
    with pytest.raises(ConfigError, match=r"NVIDIA Test has compute capability \d\.\d, and 9\.0 or more"):
        resolve_device(config)
    assert resolve_device(EngineConfig(model="m", device="cpu")) == torch.device("cpu")
