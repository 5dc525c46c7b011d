"""What CUDA graphs of all kinds of steps share: the model, static outputs, one memory pool and one stream.

`capture` records a step and `microseconds` times its replay. Graphs run one after the other on one stream,
and what a graph leaves in the static buffers is read before the next one starts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from leadline.engine.attention import AttentionBackend
from leadline.engine.models.base import CausalLM
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling import Sampler
from leadline.engine.sampling.triton_draw import Drawer

__all__ = ["GraphContext"]


class GraphContext:
    """Made once per runner, by its `DecodeGraphs`."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        tables: SlotTables,
        sampler: Sampler,
        windows: tuple[int | None, ...],
        *,
        block_size: int,
        max_model_len: int,
        least: Callable[[int], int],
    ) -> None:
        """`windows`: of each layer. `least`: returns the smallest of the values that all ranks pass to it;
        waits for them."""
        max_rows, device = len(tables.known), tables.device
        self.model, self.backend, self.kv_cache = model, backend, kv_cache
        self.tables, self.sampler, self.windows = tables, sampler, windows
        self.block_size, self.max_model_len = block_size, max_model_len
        self.least = least
        self.logits = torch.empty((max_rows, model.vocab_size), dtype=model.dtype, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """Those that the last replay sampled."""
        self._drawer = Drawer(max_rows, model.vocab_size, device)
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all captures: cuBLAS keeps a workspace for every stream it has seen.
        self._stream = torch.cuda.Stream()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of what `step` launches, which is run once before."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Kernels are compiled, loaded and chosen by a plain run; none of that may happen in a capture.
            step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            step()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def microseconds(self, graph: torch.cuda.CUDAGraph) -> int:
        """Return the time of a replay: the second of two, which all ranks begin together."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        self.least(0)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return self.least(int(begin.elapsed_time(end) * 1000))

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, random: torch.Tensor
    ) -> None:
        """Sample into `tokens` and the tables' `last_token`; arguments as `Drawer` takes them."""
        state = self.sampler.state
        self._drawer(
            logits,
            slots,
            positions,
            random,
            state.temperature,
            state.seed,
            self.tokens,
            self.tables.last_token,
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.backend.forward(q, k, v, *self.kv_cache[layer], self.windows[layer])
