"""Every setting of one engine, in one frozen dataclass.

Pure data: importing this module imports neither torch nor transformers, so that the command line can
build its options from it quickly. `EngineConfig.validate()` is called once, by the code that builds the
engine.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from leadline.engine.errors import ConfigError

__all__ = ["REASONING_FORMATS", "EngineConfig"]

REASONING_FORMATS = ("auto", "none", "think", "mistral", "harmony", "gemma4")


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """Settings of one engine.

    Sizes are in the unit their name or comment says; None means "decide for me".
    """

    model: str
    """`smollm2`, `hf://org/name[@revision]`, `file:///path`, or a path."""
    served_name: str | None = None
    task: str = "auto"
    """generate | embed (vectors) | rerank (scores of pairs of texts) | auto: what the model's files say."""
    dtype: str = "auto"
    """auto (the checkpoint's on GPU, float32 on CPU) | float32 | float16 | bfloat16."""
    device: str = "auto"
    """auto | cpu | cuda."""
    load_format: str = "auto"
    """auto | dummy (random weights of the config's shape, for benchmarks)."""
    quantization: str | None = None
    """fp8: weights of the layers in 8 bits (e4m3, a scale a row), activations likewise as they come."""
    kv_cache_dtype: str = "auto"
    """auto (the model's) | fp8 (e4m3, scaled by head: twice the tokens in the same memory)."""
    tool_format: str | None = None
    """Form in which the model writes tool calls (docs/models.md lists them); read from its chat template when
    left out."""
    constraint_provider: str | None = None
    """Entry point that may constrain the answer of each chat (examples/policies); none when left out."""
    download_dir: str | None = None
    seed: int = 0

    tensor_parallel: int = 1
    max_model_len: int | None = None
    """Tokens, prompt and output together. None: the model's own limit, cut to what the KV pool can hold."""

    block_size: int = 64
    """Tokens a KV block; 16, 32, 64, 128 or 256."""
    gpu_memory_utilization: float = 0.9
    cpu_kv_bytes: int = 1 << 30
    num_kv_blocks: int | None = None
    """Overrides the derived pool size; tests use it to force preemption."""
    prefix_caching: bool = True
    eviction_policy: str = "lru"

    max_concurrent_requests: int = 256
    """Sequences running at once (rows of a decode batch)."""
    max_queued_requests: int = 2048
    max_num_batched_tokens: int = 8192
    """Token budget of one step."""
    prefill_chunk: int | None = None
    """Most prompt tokens of one sequence in one step; None: whatever is left of the budget."""
    prefill_step_ms: float | None = None
    """Milliseconds a step may take when it computes prompts while interactive requests decode: longer prompts
    are cut into chunks that fit. 0: no bound. None: for a server 50 on a GPU and 80 on a CPU; else no
    bound."""
    scheduling_policy: str = "weighted"
    class_weights: dict[str, float] = field(default_factory=lambda: {"interactive": 4.0, "batch": 1.0})
    queue_timeout: float | None = None
    """Seconds a request may wait by default; None: without limit."""

    attention_backend: str = "auto"
    """auto | torch | flash_attn | triton."""
    enforce_eager: bool = False
    """Run every step kernel by kernel: no CUDA graphs, no time and memory spent on capturing them."""
    overlap: bool | None = None
    """Launch step N+1 before reading step N. None: on for GPU, off for CPU."""
    speculative_ngram: int = 0
    """Most tokens a step drafts for one sequence by looking its latest ones up in it; 0: no speculation."""
    speculative_match: int = 3
    """Latest tokens that must stand earlier in the sequence for a draft."""
    speculative_max_batch: int | None = None
    """Decoding sequences above which nothing is drafted. None: what was measured to pay on the device."""
    cpu_threads: int | None = None
    """torch intra-op threads on CPU; None: all cores that affinity and CPU limit grant this process."""

    numa: str = "off"
    """Bind the engine's processes to CPUs: off | auto (the GPU's NUMA node) | a node's number."""
    nvtx: bool = False
    """Mark the phases of each step with NVTX ranges, for Nsight Systems."""
    profile_dir: str | None = None
    """Folder for the traces that POST /admin/profile records; None: it records none."""

    reasoning_format: str = "auto"
    """How the model writes its thoughts: auto (its chat template tells) | none | think | mistral | harmony |
    gemma4."""
    thinking_budget: int | None = None
    """Tokens a thought may have where a request sets no limit; then the engine ends it. None: any number."""

    max_logprobs: int = 20
    max_n: int = 128

    def replace(self, **changes: object) -> EngineConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def validate(self) -> EngineConfig:
        """Return self, or raise ConfigError naming the first setting that cannot work."""
        if self.block_size not in (16, 32, 64, 128, 256):
            raise ConfigError(f"block_size must be 16, 32, 64, 128 or 256, not {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], not {self.gpu_memory_utilization}")
        for name in (
            "tensor_parallel",
            "max_concurrent_requests",
            "max_num_batched_tokens",
            "cpu_kv_bytes",
            "max_n",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.speculative_ngram <= 32:
            raise ConfigError(f"speculative_ngram must lie in [0, 32], not {self.speculative_ngram}")
        if self.speculative_match < 1:
            raise ConfigError(f"speculative_match must be at least 1, not {self.speculative_match}")
        for name in (
            "max_model_len",
            "prefill_chunk",
            "num_kv_blocks",
            "cpu_threads",
            "speculative_max_batch",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len must be at least 2: a token of prompt, and one of output")
        if self.prefill_step_ms is not None and not 0 <= self.prefill_step_ms < math.inf:
            raise ConfigError(
                f"prefill_step_ms must be a number of milliseconds from 0 on, not {self.prefill_step_ms}"
            )
        if self.queue_timeout is not None and not 0 <= self.queue_timeout < math.inf:
            raise ConfigError(f"queue_timeout must be a number of seconds, not {self.queue_timeout}")
        if self.task not in ("auto", "generate", "embed", "rerank"):
            raise ConfigError(f"task must be auto, generate, embed or rerank, not {self.task!r}")
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32, float16 or bfloat16, not {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda, not {self.device!r}")
        if self.numa not in ("off", "auto") and not self.numa.isdecimal():
            raise ConfigError(f"numa must be off, auto or the number of a node, not {self.numa!r}")
        if self.quantization not in (None, "fp8"):
            raise ConfigError(f"quantization must be fp8 or left out, not {self.quantization!r}")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ConfigError(f"kv_cache_dtype must be auto or fp8, not {self.kv_cache_dtype!r}")
        if self.kv_cache_dtype == "fp8" and self.attention_backend == "flash_attn":
            raise ConfigError(
                "kv_cache_dtype 'fp8' needs attention_backend 'triton' or 'torch': 'flash_attn' reads none"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format must be auto or dummy, not {self.load_format!r}")
        if self.reasoning_format not in REASONING_FORMATS:
            raise ConfigError(
                f"reasoning_format must be one of {', '.join(REASONING_FORMATS)}, not "
                f"{self.reasoning_format!r}"
            )
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise ConfigError(f"thinking_budget must not be negative, got {self.thinking_budget}")
        for name in ("max_queued_requests", "max_logprobs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_concurrent_requests > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_concurrent_requests ({self.max_concurrent_requests}): every running request decodes "
                "one token a step"
            )
        if set(self.class_weights) != {"interactive", "batch"} or not all(
            0 < weight < math.inf for weight in self.class_weights.values()
        ):
            raise ConfigError("class_weights needs a positive weight for 'interactive' and for 'batch'")
        return self
