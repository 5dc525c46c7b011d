"""The settings the scheduler needs, resolved: no None that means "decide for me"."""

from __future__ import annotations

from dataclasses import dataclass

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError

__all__ = ["SchedulerConfig"]


@dataclass(slots=True, frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes are tokens unless the name says otherwise."""

    max_model_len: int
    block_size: int = 64
    max_concurrent_requests: int = 256
    max_queued_requests: int = 2048
    max_num_batched_tokens: int = 8192
    prefill_chunk: int | None = None
    prefill_step_seconds: float = 0.0
    """What a step with prompts may take while interactive requests decode; 0: no bound."""
    attention_work: float = 0.0
    """Cost of attending to one key relative to one token's matrix products."""
    prefix_caching: bool = True
    speculative_ngram: int = 0
    """Most tokens drafted for one sequence in one step; 0: no speculation."""
    speculative_match: int = 3
    speculative_max_batch: int = 4
    queue_timeout: float | None = None
    """Seconds; for requests that name none."""
    model: str = ""
    """With revision, what the prefix chain's namespace is made of: the gateway must use the same."""
    revision: str = ""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_concurrent_requests", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1, not {self.prefill_chunk}")
        if self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")
        if self.max_concurrent_requests > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_concurrent_requests ({self.max_concurrent_requests}): every running request decodes "
                "one token a step"
            )

    @classmethod
    def from_engine(
        cls,
        config: EngineConfig,
        *,
        max_model_len: int,
        model: str = "",
        revision: str = "",
        speculative_max_batch: int = 4,
        prefill_step_ms: float = 0.0,
        attention_work: float = 0.0,
    ) -> SchedulerConfig:
        """Of an engine's settings, with the context length, the model identity and what is best on the device
        that loading resolved."""
        return cls(
            max_model_len=max_model_len,
            block_size=config.block_size,
            max_concurrent_requests=config.max_concurrent_requests,
            max_queued_requests=config.max_queued_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            prefill_step_seconds=prefill_step_ms / 1000,
            attention_work=attention_work,
            prefix_caching=config.prefix_caching,
            speculative_ngram=config.speculative_ngram,
            speculative_match=config.speculative_match,
            speculative_max_batch=speculative_max_batch,
            queue_timeout=config.queue_timeout,
            model=model or config.served_name or config.model,
            revision=revision,
        )
