"""From a folder of Hugging Face files to a decoder that runs.

    config.py    config.json and generation_config.json → ModelConfig; refuses by field name what we lack
                 layer_config.py reads what sets layers apart, rope_config.py rotary settings
    families.py  what sets the architectures apart, as data
    base.py      the contract with the runner: CausalLM, AttentionFn
    decoder.py   the one decoder, and its layers in other orders in variants.py; layers.py its parts, ops.py
                 its element-wise operations, rope.py its tables
    few_rows.py  steps of 1 to 64 rows on CUDA by fused products: triton_gemv.py, triton_skinny.py with
                 skinny_shapes.py; triton_ops.py is ops.py on CUDA
    fp8.py       weights and cache in e4m3: triton_fp8.py, kv_scales.py
    quantized_config.py, quantized_files.py
                 how a quantized checkpoint stores its linears, and reading them
    forms.py     how each linear keeps its weight; targets.py and grouped.py: where the loader puts it
    loader.py    `load_model`: safetensors, each rank reading only its part, one tensor at a time
    parallel.py  a rank's place in its tensor-parallel group

This package imports no torch; `leadline.engine.models.loader` does.
"""

from __future__ import annotations

from leadline.engine.models.config import GenerationDefaults, ModelConfig, RopeConfig, load_model_config

__all__ = ["GenerationDefaults", "ModelConfig", "RopeConfig", "load_model_config"]
