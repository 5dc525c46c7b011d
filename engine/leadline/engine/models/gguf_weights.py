"""Tensors of a GGUF file under the names and in the shapes that the decoder's slots have, dequantized row by
row as they are read.

Blocks of a row, by type (scales are float16):

    Q8_0   32 numbers of 8 bits, d                  d * n
    Q4_0   32 of 4 bits, d                          d * (n - 8)
    Q4_1   32 of 4 bits, d, m                       d * n + m
    Q5_0   32 of 5 bits, d                          d * (n - 16)
    Q5_1   32 of 5 bits, d, m                       d * n + m
    Q4_K   8 groups of 32 numbers of 4 bits, d, m   d * s * n - m * o, scale s and offset o of 6 bits a group
    Q5_K   the same with numbers of 5 bits
    Q6_K   16 groups of 16 numbers of 6 bits, d     d * s * (n - 32), scale s of 8 bits a group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from leadline.engine.errors import UnsupportedModel
from leadline.engine.hub.gguf_file import GGUFFile, GGUFTensor

__all__ = ["TYPES", "GGUFTensors", "dequantize"]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Architecture, as general.architecture has it → names of norms of a layer."""


class GGUFTensors:
    """What `safetensors.safe_open` returns, for a GGUF file."""

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._architecture = str(file.metadata.get("general.architecture"))
        heads = f"{self._architecture}.attention.head_count"
        self._heads = {
            "attn_q": int(file.metadata.get(heads, 1)),
            "attn_k": int(file.metadata.get(f"{heads}_kv", file.metadata.get(heads, 1))),
        }
        self._tensors = {self._name(name): (name, tensor) for name, tensor in file.tensors.items()}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        stored, tensor = self._tensors[name]
        part = stored.split(".")[-2]
        offset = 1.0 if self._architecture == "gemma3" and part.endswith("norm") else 0.0
        heads = self._heads.get(part, 0) if self._architecture == "llama" else 0
        return _Slice(self._data, stored, tensor, offset, heads)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[(slice(None),)]

    def _name(self, stored: str) -> str:
        """A name that the decoder does not know stays as it is, and the loader names it."""
        if stored in _OUTER:
            return _OUTER[stored]
        pieces = stored.split(".")
        if len(pieces) != 4 or pieces[0] != "blk":
            return stored
        name = {**_OF_LAYER, **_NORMS.get(self._architecture, {})}.get(pieces[2])
        return stored if name is None else f"model.layers.{pieces[1]}.{name}.{pieces[3]}"


@dataclass(slots=True, frozen=True)
class _Slice:
    """A tensor, read when it is indexed."""

    data: np.ndarray
    name: str
    tensor: GGUFTensor
    offset: float
    """It has this much added (norms of Gemma have the 1 that checkpoints leave out)."""
    heads: int
    """Rows of each of so many heads lie as neighbouring pairs, not as halves; 0: in order."""

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """index: of rows, or of all rows and some columns. Rows of a tensor with `heads` are whole heads."""
        tensor = self.tensor
        if tensor.kind not in TYPES:
            raise UnsupportedModel(
                f"tensor {self.name} has ggml's type {tensor.kind}, which is not supported"
            )
        form = TYPES[tensor.kind]
        width = tensor.shape[-1]
        if width % form.numbers:
            raise UnsupportedModel(f"tensor {self.name} has rows of {width} numbers, no whole blocks")
        row_bytes = width // form.numbers * form.size
        flat = len(tensor.shape) == 1
        rows = slice(0, 1) if flat else slice(*index[0].indices(tensor.shape[0]))
        start, end = tensor.start + rows.start * row_bytes, tensor.start + rows.stop * row_bytes
        if end > len(self.data):
            raise UnsupportedModel(f"tensor {self.name} reaches beyond the end of the file; is it complete?")
        raw = torch.from_numpy(np.array(self.data[start:end])).view(rows.stop - rows.start, row_bytes)
        value = dequantize(raw, tensor.kind)
        if self.offset:
            value -= self.offset
        if self.heads:
            size = tensor.shape[0] // self.heads
            value = value.view(-1, size // 2, 2, width).transpose(1, 2).reshape(-1, width)
        if flat:
            return value[0][index[0]]
        return value[:, index[1]] if len(index) > 1 else value


def dequantize(raw: torch.Tensor, kind: int) -> torch.Tensor:
    """raw uint8 [rows, bytes of a row] → float32 [rows, numbers of a row]."""
    form = TYPES[kind]
    blocks = raw.reshape(-1, form.size)
    return form.read(blocks).reshape(len(raw), -1)


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """float16 numbers at byte `start` of each block → float32 [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """[..., n] → [..., 2n]: all low ones, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The bits of four bytes, lowest first, as 16 or 0: uint8 [blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, start : start + 4, None] >> shifts) & 1).flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _halves(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16) * _halves(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float()
    return numbers * _halves(blocks, 0) + _halves(blocks, 2)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes → 8 scales and 8 offsets of 6 bits. The first four of each are the low bits of bytes 0 to 7;
    the others have their low nibbles in bytes 8 to 11 and their two high bits above the first four."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=1)
    offsets = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=1)
    return scales.float(), offsets.float()


def _k_numbers(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """numbers [blocks, 8, 32] of Q4_K and Q5_K, whose blocks begin alike."""
    scales, offsets = _k_scales(blocks[:, 4:16])
    scales, offsets = scales * _halves(blocks, 0), offsets * _halves(blocks, 2)
    return numbers.float() * scales[:, :, None] - offsets[:, :, None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # 32 bytes hold two groups: the low nibbles are the first.
    return _k_numbers(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    # Bit g of byte i is the fifth bit of number i of group g.
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return _k_numbers(blocks, _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # Of each 128 numbers: 64 bytes of low nibbles, and 32 bytes with two high bits of numbers 32 apart.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(2)
    numbers = (low | (high << 4)).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208)
    return numbers * scales[:, :, None]


@dataclass(slots=True, frozen=True)
class _Form:
    numbers: int
    """Of a block."""
    size: int
    """Bytes of a block."""
    read: Callable[[torch.Tensor], torch.Tensor]
    """uint8 [blocks, size] → float32, numbers of each block in order."""


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


TYPES: dict[int, _Form] = {
    0: _Form(1, 4, _plain(torch.float32)),
    1: _Form(1, 2, _plain(torch.float16)),
    2: _Form(32, 18, _q4_0),
    3: _Form(32, 20, _q4_1),
    6: _Form(32, 22, _q5_0),
    7: _Form(32, 24, _q5_1),
    8: _Form(32, 34, _q8_0),
    12: _Form(256, 144, _q4_k),
    13: _Form(256, 176, _q5_k),
    14: _Form(256, 210, _q6_k),
    30: _Form(1, 2, _plain(torch.bfloat16)),
}
"""By ggml's number of the type."""
