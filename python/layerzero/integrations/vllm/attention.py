"""vLLM's attention by LayerZero: keys and values go into vLLM's pages by its slots, and are read by its block tables.

Importing this module imports vLLM, which does it when the backend is asked for.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import layerzero as lz
from layerzero.errors import InvalidCallError
from layerzero.integrations import vllm as plugin
from layerzero.integrations.captures import prepared
from layerzero.integrations.refusals import unsupported

__all__ = ["LayerZeroBackend", "LayerZeroImpl", "LayerZeroMetadata", "LayerZeroMetadataBuilder", "pages"]


class LayerZeroBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend before it builds anything."""

    # Asked for by versions up to 0.19: attention writes into a tensor that it is given.
    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's registry."""
        return plugin.name()

    @staticmethod
    def get_impl_cls() -> type[LayerZeroImpl]:
        """Attention of a layer."""
        return LayerZeroImpl

    @staticmethod
    def get_builder_cls() -> type[LayerZeroMetadataBuilder]:
        """What describes a step's batch to all layers."""
        return LayerZeroMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens of a page. Kernels for GPUs want multiples of 16."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The cache of a layer, for versions of vLLM that let the backend choose it: keys, then values, each NHD."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The memory orders that are read, the better one first: heads inside a token, heads outside."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are served."""
        return True

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Never: with `shared_prefixes`, the kernel for decoding finds the pages that requests share by itself.

        vLLM runs no full CUDA graph for a batch that it splits into a common prefix and the rest, and its newer model runner
        does not look for a common prefix.
        """
        return False


@dataclass
class LayerZeroMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step's batch: requests with one query come first, the others after them."""

    num_actual_tokens: int
    """Tokens, without those that only fill up the batch."""
    num_decodes: int
    """Requests with one query. Their queries are the first rows."""
    decode_tables: torch.Tensor
    """(num_decodes, width): their pages."""
    decode_lens: torch.Tensor
    """(num_decodes,): how many tokens of each are in the cache, the new one included."""
    prefill_tables: torch.Tensor
    prefill_lens: torch.Tensor
    prefill_starts: torch.Tensor
    """(other requests + 1,): where the queries of each begin, among those of the other requests."""
    slot_mapping: torch.Tensor
    """(num_actual_tokens,): where each token's key and value go; -1 for none."""
    graph: bool
    """Whether vLLM may capture this batch's attention in a CUDA graph."""


def _expect_shared_prefixes() -> None:
    """Says that requests begin alike, unless somebody said otherwise."""
    setting = next(setting for setting in lz.settings() if setting.key == "shared_prefixes")
    if setting.origin["layer"] == "default":
        lz.configure(shared_prefixes=True)


class LayerZeroMetadataBuilder(AttentionMetadataBuilder[LayerZeroMetadata]):  # type: ignore[misc]
    """Makes the description of a batch out of vLLM's."""

    # A step of one token per request has the same launches whatever the lengths are. A prefill's depend on them.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size: int = kv_cache_spec.block_size
        # vLLM brings requests with at most this many queries to the front.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        if vllm_config.cache_config.enable_prefix_caching:
            _expect_shared_prefixes()
        compilation = vllm_config.compilation_config
        full = device.type == "cuda" and compilation.cudagraph_mode.has_full_cudagraphs()
        self._captured = frozenset(compilation.cudagraph_capture_sizes or ()) if full else frozenset()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LayerZeroMetadata:
        """The description of one batch, for all layers."""
        return self._described(common_attn_metadata, capturing=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> LayerZeroMetadata:
        """The description of a batch that a full CUDA graph is captured with.

        Its tensors are vLLM's own, which vLLM fills for each replay. Lengths and pages are then others; shapes are not.
        """
        return self._described(common_attn_metadata, capturing=True)

    def _described(self, given: Any, *, capturing: bool) -> LayerZeroMetadata:
        if given.causal is not True:
            raise _refused(f"a batch with causal={given.causal}")
        decodes, _, decode_tokens, _ = split_decodes_and_prefills(given, decode_threshold=1)
        if decodes != decode_tokens:
            # Rows without a query that fill up a batch: they have a length, and no row among the queries.
            decodes = decode_tokens = 0
        starts, lens = given.query_start_loc, given.seq_lens
        # vLLM runs a batch of each captured size before it captures one, with either description.
        graph = decodes == given.num_reqs and (capturing or decodes in self._captured)
        tables = given.block_table_tensor[: given.num_reqs]
        if not graph:
            # A graph reads vLLM's own table at every replay, whatever its width: a copy would be of this batch alone.
            tables = self._narrow(tables, given.max_seq_len)
        return LayerZeroMetadata(
            num_actual_tokens=given.num_actual_tokens,
            num_decodes=decodes,
            decode_tables=tables[:decodes],
            decode_lens=lens[:decodes],
            prefill_tables=tables[decodes:],
            prefill_lens=lens[decodes : given.num_reqs],
            prefill_starts=starts[decodes : given.num_reqs + 1] - decode_tokens
            if decodes < given.num_reqs
            else starts[:0],
            slot_mapping=given.slot_mapping[: given.num_actual_tokens],
            graph=graph,
        )

    def _narrow(self, tables: torch.Tensor, longest: int) -> torch.Tensor:
        """The columns that the longest sequence needs, up to a power of two, so that there are few different widths.

        vLLM's table has columns for the longest sequence that the model allows.
        """
        needed = max(-(-longest // self._block_size), 1)
        width = 1 << (needed - 1).bit_length()
        return tables if width >= tables.shape[1] else tables[:, :width].contiguous()


class LayerZeroImpl(AttentionImpl[LayerZeroMetadata]):  # type: ignore[misc]
    """Attention of one layer."""

    #: Kinds of calls that were made ready for captures, in this process.
    _ready: ClassVar[set[tuple[Any, ...]]] = set()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM's window counts the query's own position.
        self.window = None if sliding_window is None else sliding_window - 1
        self.softcap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self._pages: tuple[torch.Tensor, torch.Tensor, str] | None = None
        self._paged: weakref.ref[torch.Tensor] | None = None
        refused = {
            "alibi_slopes": alibi_slopes is not None,
            "sinks": sinks is not None,
            f"attn_type={attn_type!s}": attn_type != AttentionType.DECODER,
            f"kv_cache_dtype={kv_cache_dtype}": kv_cache_dtype not in LayerZeroBackend.supported_kv_cache_dtypes,
            **{name: bool(value) and value != -1 for name, value in others.items()},
        }
        if wrong := [name for name, is_so in refused.items() if is_so]:
            raise _refused(", ".join(wrong))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: LayerZeroMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the new keys and values, and the attention of the queries into ``output``.

        Args:
            layer: vLLM's layer.
            query: (tokens, heads, head_size).
            key: (tokens, kv_heads, head_size); None if another layer has written them.
            value: likewise.
            kv_cache: the layer's pages.
            attn_metadata: the batch; None while vLLM measures memory.
            output: (tokens, heads, head_size).
            output_scale: not served.
            output_block_scale: not served.
        """
        if output_scale is not None or output_block_scale is not None:
            raise _refused("a quantized output (output_scale, output_block_scale)")
        if output is None:
            raise _refused("a call without a tensor to write into (output is None)")
        if attn_metadata is None:
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        queries, outputs = _first(query, rows), _first(output, rows)
        keys, values, layout = self._views(kv_cache)
        with self._made_ready(attn_metadata, query):
            if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
                new = _first(key, rows), _first(value, rows)
                lz.kv_append(*new, keys, values, attn_metadata.slot_mapping, layout=layout)
            shared: dict[str, Any] = {"window": self.window, "softcap": self.softcap, "layout": layout}
            first = attn_metadata.num_decodes
            if first:
                lz.paged_attention(
                    _first(queries, first),
                    keys,
                    values,
                    attn_metadata.decode_tables,
                    attn_metadata.decode_lens,
                    self.scale,
                    out=_first(outputs, first),
                    **shared,
                )
            if first < rows:
                lz.paged_attention(
                    queries[first:] if first else queries,
                    keys,
                    values,
                    attn_metadata.prefill_tables,
                    attn_metadata.prefill_lens,
                    self.scale,
                    cu_seqlens_q=attn_metadata.prefill_starts,
                    causal=True,
                    out=outputs[first:] if first else outputs,
                    **shared,
                )
        return output

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
        """:func:`pages` of the layer's cache, which is the same tensor in every step."""
        if self._pages is None or self._paged is None or self._paged() is not kv_cache:
            # Views keep the memory: without its cache, which vLLM may have made only to measure, they are dropped.
            self._paged, self._pages = weakref.ref(kv_cache, self._drop_views), pages(kv_cache, self.head_size)
        return self._pages

    def _drop_views(self, cache: weakref.ref[torch.Tensor]) -> None:
        if self._paged is cache:
            self._pages = None

    def _made_ready(self, batch: LayerZeroMetadata, query: torch.Tensor) -> AbstractContextManager[Any]:
        """``lz.capture`` around the first run of a kind of batch that vLLM may capture; vLLM runs it before it does."""
        if not batch.graph:
            return nullcontext()
        kind: tuple[Any, ...] = (query.device, query.dtype, batch.num_decodes, batch.decode_tables.shape[1])
        kind += (self.num_heads, self.num_kv_heads, self.head_size, self.window, self.softcap)
        return prepared(kind, self._ready)


def pages(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The keys and values of a layer's cache, as views, and their layout.

    vLLM gives (pages, kv_heads, page_size, 2 * head_size) in either memory order; versions that ask for it give what
    :meth:`LayerZeroBackend.get_kv_cache_shape` says.
    """
    if kv_cache.dim() == 5:
        return kv_cache[0], kv_cache[1], "NHD"
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_size:
        expected = "(pages, kv_heads, page_size, 2 * head_size)"
        raise _refused(f"a cache of shape {tuple(kv_cache.shape)} for heads of {head_size}; it knows {expected}")
    layout = "HND"
    if kv_cache.stride(1) < kv_cache.stride(2):
        # The heads of a token lie together.
        kv_cache, layout = kv_cache.transpose(1, 2), "NHD"
    return kv_cache[..., :head_size], kv_cache[..., head_size:], layout


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Its first rows. A slice costs the host about 1 µs in every layer, so all of them are the tensor itself."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _refused(what: str) -> InvalidCallError:
    return unsupported("LayerZero's attention in vLLM", what, "use another attention backend for this model")


def __getattr__(name: str) -> Any:
    """``BackendOnCpu``: LayerZero's backend if it was asked for, vLLM's own for CPUs otherwise."""
    if name != "BackendOnCpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if plugin.served_on_cpu():
        return LayerZeroBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
