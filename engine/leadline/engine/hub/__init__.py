"""From a model's name to a folder of Hugging Face files on this machine.

`resolve_model` takes `smollm2` (the demo model), `hf://org/name[@revision]`, `file:///path` or a path, and
returns a `LocalModel`. Importing this package imports neither torch, transformers nor huggingface_hub.
"""

from __future__ import annotations

from leadline.engine.hub.local import LocalModel
from leadline.engine.hub.resolve import resolve_model

__all__ = ["LocalModel", "resolve_model"]
