"""SGLang's attention by LayerZero: keys and values are read where SGLang's pool has them, by block tables out of its own.

Importing this module imports SGLang, which does it when the backend is asked for.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

import layerzero as lz
from layerzero.errors import InvalidCallError
from layerzero.integrations.captures import prepared
from layerzero.integrations.refusals import unsupported

_WHO = "LayerZero's attention in SGLang"

__all__ = ["Batch", "LayerZeroAttnBackend"]

#: What is served: prompts, one token per request, both together, nothing.
_MODES = ("EXTEND", "DECODE", "MIXED", "IDLE")


@dataclass
class Batch:
    """A step's batch, for all layers."""

    tables: torch.Tensor
    """(requests, width): the pages of each request."""
    lengths: torch.Tensor
    """(requests,): how many tokens of each are in the cache, the new ones included."""
    starts: torch.Tensor | None
    """(requests + 1,): where the queries of each begin; None if each has one."""
    graph: bool = False
    """Whether SGLang captures this step in a CUDA graph. The tensors are then the same at every replay."""


class LayerZeroAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of all layers of a model."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._table: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._pool: Any = model_runner.token_to_kv_pool
        self._page: int = model_runner.page_size
        self.forward_metadata: Batch | None = None
        # (largest batch, pages of the longest request), (largest batch,): what captured steps read.
        self._graph_tables: torch.Tensor | None = None
        self._graph_lengths: torch.Tensor | None = None
        self._ready: set[tuple[Any, ...]] = set()
        if getattr(model_runner, "use_mla_backend", False):
            raise _refused("MLA")
        if hasattr(self._pool, "translate_loc_from_full_to_swa"):
            raise _refused("a cache of its own for layers with windows")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describes the batch that the layers are called for next."""
        mode = forward_batch.forward_mode.name
        if mode not in _MODES:
            raise _refused(f"steps of the kind {mode}")
        if mode == "IDLE":
            self.forward_metadata = None
            return
        lengths = forward_batch.seq_lens
        # SGLang has the lengths on the host too, so that nobody waits for the device.
        on_host = forward_batch.seq_lens_cpu
        longest = int((lengths if on_host is None else on_host).max())
        # The table has the place of every token. Pages are whole, so the first token of each says which page it is.
        tables = self._table[forward_batch.req_pool_indices, : longest : self._page] // self._page
        starts = None
        if mode != "DECODE":
            starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=starts[1:])
        self.forward_metadata = Batch(tables.to(torch.int32), lengths.to(torch.int32), starts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the tensors that captured steps read, for batches of up to ``max_bs`` requests."""
        if max_num_tokens != max_bs:
            raise unsupported(
                _WHO,
                f"CUDA graphs of {max_num_tokens} tokens for {max_bs} requests",
                "start SGLang without speculative decoding, or with --disable-cuda-graph",
            )
        shape, device = (max_bs, -(-self._table.shape[1] // self._page)), self._table.device
        self._graph_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._graph_lengths = torch.ones(max_bs, dtype=torch.int32, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of rows that fill up a captured batch: they read place 0, which nobody else does."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a step is captured or replayed: says which tensors it reads. Nothing is computed here."""
        mode = forward_batch.forward_mode.name
        if mode not in ("DECODE", "IDLE"):
            raise unsupported(
                _WHO,
                f"CUDA graphs of the kind {mode}",
                "start SGLang with graphs for decoding only, or with --disable-cuda-graph",
            )
        if self._graph_tables is None or self._graph_lengths is None:
            raise RuntimeError("init_cuda_graph_state makes what a captured step reads: it was not called")
        rows = forward_batch.batch_size
        self.forward_metadata = Batch(self._graph_tables[:rows], self._graph_lengths[:rows], None, graph=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Inside a captured step: makes its block table out of SGLang's table, which has changed at every replay."""
        batch = self.forward_metadata
        if batch is None or not batch.graph:
            return
        rows = forward_batch.req_pool_indices[: len(batch.lengths)]
        # The place of the first token of every page that a request can have. Beyond its length they are of no account.
        places = self._table[:, :: self._page].index_select(0, rows.long())
        torch.div(places.to(torch.int32), self._page, rounding_mode="floor", out=batch.tables)
        batch.lengths.copy_(forward_batch.seq_lens[: len(batch.lengths)])

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The queries of each request are its last positions."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    #: One query per request: the batch says how many there are.
    forward_decode = forward_extend

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, others: dict[str, Any]
    ) -> torch.Tensor:
        if given := [name for name, value in others.items() if value is not None]:
            raise _refused(", ".join(given))
        if layer.is_cross_attention or getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
            raise _refused("attention that is not a decoder's")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            raise _refused("a temperature that depends on the length (Grok)")
        if layer.qk_head_dim != layer.v_head_dim:
            raise _refused(f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim}")
        if (stored := self._pool.get_key_buffer(layer.layer_id).dtype) != q.dtype:
            raise _refused(f"a cache of {stored} for queries of {q.dtype}")
        batch = self.forward_metadata
        if batch is None:
            raise RuntimeError("init_forward_metadata describes a batch before its layers run: it was not called")
        if save and k is not None and v is not None:
            # The pool knows how it stores them.
            self._pool.set_kv_buffer(layer, _written(forward_batch.out_cache_loc), k, v)
        keys, values = (
            buffer.view(-1, self._page, *buffer.shape[1:])
            for buffer in (self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id))
        )
        window = layer.sliding_window_size
        shared: dict[str, Any] = {
            "window": None if window is None or window < 0 else window,
            "softcap": layer.logit_cap or 0.0,
            "layout": "NHD",
        }
        if batch.starts is not None:
            shared |= {"cu_seqlens_q": batch.starts, "causal": True}
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        kind = (q.device, q.dtype, tuple(query.shape), keys.shape[2], shared["window"], shared["softcap"])
        with prepared(kind, self._ready) if batch.graph and q.is_cuda else nullcontext():
            attended: torch.Tensor = lz.paged_attention(
                query, keys, values, batch.tables, batch.lengths, layer.scaling, **shared
            )
        return attended.view(query.shape[0], -1)


def _written(places: torch.Tensor) -> Any:
    """Where new tokens go, as this version of SGLang says it."""
    from sglang.srt.mem_cache import memory_pool

    kind = getattr(memory_pool, "KVWriteLoc", None)
    return places if kind is None else kind(places)


def _refused(what: str) -> InvalidCallError:
    return unsupported(_WHO, what, "use another --attention-backend for this model")
