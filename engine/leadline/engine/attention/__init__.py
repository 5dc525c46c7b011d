"""Attention over the paged KV cache, behind one interface.

    interface.py       what a backend gets and owes; how the cache is laid out
    torch_backend.py   the reference, and the CPU path
    flash_backend.py   flash-attn on NVIDIA GPUs
    triton_backend.py  our Triton kernels on NVIDIA GPUs

`make_backend(name, spec)` picks one; the GPU modules are imported only when asked for.
"""

from __future__ import annotations

from leadline.engine.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from leadline.engine.errors import ConfigError

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionSpec", "make_backend"]

_NAMES = ("auto", "torch", "flash_attn", "triton")


def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`; "auto" is torch on CPU, and on CUDA the first of flash_attn, triton, torch
    that can be imported and takes these shapes.

    Raises ConfigError when the name is unknown, or when the backend asked for does not work here (the message
    says why).
    """
    if name not in _NAMES:
        raise ConfigError(f"attention_backend must be one of {', '.join(_NAMES)}, not {name!r}")
    if name == "torch" or (name == "auto" and spec.device.type != "cuda"):
        from leadline.engine.attention.torch_backend import TorchBackend

        return TorchBackend(spec)
    if name != "auto":
        return _make_gpu(name, spec)
    for candidate in ("flash_attn", "triton"):
        try:
            return _make_gpu(candidate, spec)
        except ConfigError:
            continue
    return make_backend("torch", spec)


def _make_gpu(name: str, spec: AttentionSpec) -> AttentionBackend:
    if spec.device.type != "cuda":
        raise ConfigError(
            f"attention_backend {name!r} needs an NVIDIA GPU; on {spec.device.type} use 'torch'"
        )
    try:
        if name == "flash_attn":
            from leadline.engine.attention.flash_backend import FlashBackend

            return FlashBackend(spec)
        from leadline.engine.attention.triton_backend import TritonBackend

        return TritonBackend(spec)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend {name!r} cannot be imported ({error}); install it or choose another of "
            f"{', '.join(_NAMES)}"
        ) from error
