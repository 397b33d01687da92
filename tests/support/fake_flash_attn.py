"""FlashAttention 2, 3 and 4 for the CPU: the signatures of their sources, what those check, and what they compute.

Computed is what the sources do, not what is asked of them: where they give something else than the contract, a call that
reaches them shows it. Rows they do not write to are NaN.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from attention_calls import attend, positions
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def must(condition: bool, text: str) -> None:
    """What the library's own checks do."""
    if not condition:
        raise RuntimeError(text)


def loads(*tensors: Tensor) -> None:
    """The kernels load 16 bytes at a time without looking; a wrong address stops the device."""
    for t in tensors:
        rows = [stride for stride, size in zip(t.stride()[:-1], t.shape[:-1], strict=True) if size > 1]
        must(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        must(t.data_ptr() % 16 == 0 and not any(s * t.element_size() % 16 for s in rows), "misaligned address")


def window_of(seq_q: int, seq_k: int, left: int, right: int) -> Tensor:
    """Which keys lie within a window, each side of which may be open."""
    query, key = positions(seq_q, seq_k)
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        allowed &= key >= query - left
    if right >= 0:
        allowed &= key <= query + right
    return allowed


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The tokens of a sequence, heads first."""
    gathered = cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
    return gathered.transpose(0, 1)


def log_sums(q: Tensor, k: Tensor, allowed: Tensor, scale: float, softcap: float, nothing: float) -> Tensor:
    """The logarithms of the softmaxes' sums, heads first, in float32; `nothing` where a query attends to nothing."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3).transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    lse = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1).float()
    return lse.masked_fill(lse == -torch.inf, nothing)


def tokens(tensor: Tensor, bounds: Tensor, sequence: int) -> Tensor:
    """The packed keys or values of a sequence, heads first."""
    start, end = bounds[sequence : sequence + 2].tolist()
    return tensor[start:end].transpose(0, 1)


class FlashAttention2:
    """v2.8.3: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp."""

    def __init__(self, sm: int = 80) -> None:
        self.sm = sm
        self.calls: list[dict[str, Any]] = []

    def module(self) -> types.ModuleType:
        """The module `flash_attn`."""
        module = types.ModuleType("flash_attn")
        module.__dict__.update(
            __version__="2.8.3",
            flash_attn_func=self.flash_attn_func,
            flash_attn_varlen_func=self.flash_attn_varlen_func,
            flash_attn_with_kvcache=self.flash_attn_with_kvcache,
        )
        return module

    def _check(self, q: Tensor, k: Tensor, v: Tensor, softcap: float, dropout_p: float, scale: float) -> None:
        must(self.sm >= 80, "FlashAttention only supports Ampere GPUs or newer.")
        must(q.dtype in HALF and k.dtype == q.dtype == v.dtype, "FlashAttention only support fp16 and bf16 data type")
        must(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        must(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
        must(k.shape == v.shape, "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
        must(softcap == 0.0 or dropout_p == 0.0, "Softcapping does not support dropout for now")
        must(scale > 0.0, "exp2(score * scale - max(score) * scale) overflows")

    @staticmethod
    def _reach(seq_q: int, seq_k: int, longest_k: int, causal: bool, window: tuple[int, int], alibi: bool) -> Tensor:
        left, right = (side if side < longest_k else -1 for side in window)
        if seq_q == 1 and not alibi:
            causal = False
        if causal:
            right = 0
        if left < 0 <= right:
            left = longest_k
        if right < 0 <= left:
            right = longest_k
        return window_of(seq_q, seq_k, left, right)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        self.calls.append(dict(locals()))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k, v, softcap, dropout_p, scale)
        if q.shape[-1] % 8 == 0:
            loads(q, k, v)
        must(min(q.shape[:3]) > 0 and max(q.shape[0], q.shape[2]) <= 65535, "invalid grid")
        seq_q, seq_k = q.shape[1], k.shape[1]
        bias = None
        if alibi_slopes is not None:
            must(alibi_slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32")
            must(alibi_slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension")
            query, key = positions(seq_q, seq_k)
            bias = -alibi_slopes.double()[:, None, None] * (query - key).abs()
        kept = None
        if dropout_p > 0.0:
            drawn = torch.rand(q.shape[0], q.shape[2], seq_q, seq_k)
            kept = (drawn >= dropout_p) / (1.0 - dropout_p)
        allowed = self._reach(seq_q, seq_k, seq_k, causal, window_size, alibi_slopes is not None)
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        output = attend(*heads_first, allowed, scale, softcap, bias, kept).transpose(1, 2).to(q.dtype)
        if not return_attn_probs:
            return output
        return output, log_sums(*heads_first[:2], allowed, scale, softcap, torch.inf), None

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Any:
        self.calls.append(dict(locals()))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k, v, softcap, dropout_p, scale)
        loads(q, k, v)
        must(all(t.dtype == torch.int32 for t in (cu_seqlens_q, cu_seqlens_k)), "must have dtype int32")
        if block_table is not None:
            self._check_pages(k, block_table, cu_seqlens_q, cu_seqlens_k)
        must(cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous(), "must be contiguous")
        must(max_seqlen_q > 0, "invalid grid")
        lengths, starts = cu_seqlens_k.diff().tolist(), cu_seqlens_q.tolist()
        if max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and window_size == (-1, -1):
            # Heads that share keys stand where queries would: row b is taken for the query of sequence b.
            q.reshape(len(lengths), k.shape[-2], -1, q.shape[2])
            starts = list(range(len(lengths) + 1))
        output = torch.full(q.shape, torch.nan, dtype=torch.float64)
        sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
        for b, length in enumerate(lengths):
            start, end = starts[b], min(starts[b + 1], starts[b] + max_seqlen_q)
            allowed = self._reach(end - start, length, max_seqlen_k, causal, window_size, False)
            if block_table is not None:
                kb, vb = pages(k, block_table[b], length), pages(v, block_table[b], length)
            else:
                must(length <= max_seqlen_k, "keys beyond max_seqlen_k are not read")
                kb, vb = tokens(k, cu_seqlens_k, b), tokens(v, cu_seqlens_k, b)
            rows = q[start:end].transpose(0, 1)
            output[start:end] = attend(rows, kb, vb, allowed, scale, softcap).transpose(0, 1)
            sums[:, start:end] = log_sums(rows, kb, allowed, scale, softcap, torch.inf)
        return (output.to(q.dtype), sums, None) if return_attn_probs else output.to(q.dtype)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | int | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        self.calls.append(dict(locals()))
        assert block_table is not None and isinstance(cache_seqlens, Tensor), "only pages are used"
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k_cache, v_cache, softcap, 0.0, scale)
        loads(q, k_cache, v_cache)
        self._check_pages(k_cache, block_table, cache_seqlens)
        must(cache_seqlens.is_contiguous() and q.shape[0] > 0, "seqlens_k must be contiguous")
        rows = []
        for b, length in enumerate(cache_seqlens.tolist()):
            capacity = block_table.shape[1] * k_cache.shape[1]
            allowed = self._reach(q.shape[1], length, capacity, causal, window_size, False)
            kb, vb = pages(k_cache, block_table[b], length), pages(v_cache, block_table[b], length)
            rows.append(attend(q[b].transpose(0, 1), kb, vb, allowed, scale, softcap).transpose(0, 1))
        return torch.stack(rows).to(q.dtype)

    @staticmethod
    def _check_pages(cache: Tensor, table: Tensor, *indices: Tensor) -> None:
        must(cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        must(cache.shape[3] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
        must(table.dtype == torch.int32 and table.stride(-1) == 1, "block_table must have dtype torch.int32")
        must(all(t.dtype == torch.int32 for t in indices), "must have dtype int32")


class FlashAttention3:
    """0251105 (3.0.0b1): hopper/flash_attn_interface.py and hopper/flash_api.cpp."""

    def __init__(self, sm: int = 90, returns_tuple: bool = False) -> None:
        self.sm = sm
        self.returns_tuple = returns_tuple
        self.calls: list[dict[str, Any]] = []

    def module(self) -> types.ModuleType:
        """The module `flash_attn_interface`."""
        module = types.ModuleType("flash_attn_interface")
        module.__dict__.update(
            flash_attn_func=self.flash_attn_func,
            flash_attn_varlen_func=self.flash_attn_varlen_func,
            flash_attn_with_kvcache=self.flash_attn_with_kvcache,
        )
        return module

    def _check(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        must(self.sm == 90, "only Hopper")
        must(q.dtype in HALF and k.dtype == q.dtype == v.dtype, "FlashAttention only supports fp16, bf16, and fp8_e4m3")
        width, v_width = q.shape[-1], v.shape[-1]
        must(width <= 256, "FlashAttention forward only supports head dimension at most 256")
        must(width % 8 == 0 and v_width % 8 == 0, "head_size should be a multiple of 8")
        other = 128 < width <= 192 and 96 < v_width <= 128 or width <= 64 and v_width <= 512
        must(width == v_width or other, "If V headdim is different from Q/K dim, …")
        must(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
        must(scale > 0.0, "exp2(score * scale - max(score) * scale) overflows")
        loads(q, k, v)

    @staticmethod
    def _reach(seq_q: int, seq_k: int, most_q: int, most_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
        left = -1 if window[0] >= most_k - 1 else window[0]
        right = -1 if window[1] >= most_q - 1 else window[1]
        if causal:
            right = 0
        if left < 0 and right == 0:
            return window_of(seq_q, seq_k, -1, 0)
        if left < 0 and right < 0:
            return window_of(seq_q, seq_k, -1, -1)
        return window_of(seq_q, seq_k, left if left >= 0 else most_k - 1, right if right >= 0 else most_q - 1)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        self.calls.append(dict(locals()))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k, v, scale)
        must(not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
        seq_q, seq_k = q.shape[1], k.shape[1]
        allowed = self._reach(seq_q, seq_k, seq_q, seq_k, causal, window_size)
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        output = attend(*heads_first, allowed, scale, softcap).transpose(1, 2).to(q.dtype)
        if return_attn_probs:
            return output, log_sums(*heads_first[:2], allowed, scale, softcap, -torch.inf)
        return (output, torch.zeros(1)) if self.returns_tuple else output

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        self.calls.append(dict(locals()))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k, v, scale)
        for bounds in (cu_seqlens_q, cu_seqlens_k):
            must(bounds.dtype == torch.int32 and bounds.is_contiguous(), "cu_seqlens must be contiguous int32")
        must(max_seqlen_q > 0 and max_seqlen_k > 0, "invalid grid")
        output = torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=torch.float64)
        sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
        starts = cu_seqlens_q.tolist()
        for b, length in enumerate(cu_seqlens_k.diff().tolist()):
            must(length <= max_seqlen_k, "keys beyond max_seqlen_k are not read")
            start, end = starts[b], min(starts[b + 1], starts[b] + max_seqlen_q)
            allowed = self._reach(end - start, length, max_seqlen_q, max_seqlen_k, causal, window_size)
            kb, vb = tokens(k, cu_seqlens_k, b), tokens(v, cu_seqlens_k, b)
            rows = q[start:end].transpose(0, 1)
            output[start:end] = attend(rows, kb, vb, allowed, scale, softcap).transpose(0, 1)
            sums[:, start:end] = log_sums(rows, kb, allowed, scale, softcap, -torch.inf)
        if return_attn_probs:
            return output.to(q.dtype), sums
        return (output.to(q.dtype), torch.zeros(1)) if self.returns_tuple else output.to(q.dtype)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | int | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        self.calls.append(dict(locals()))
        assert page_table is not None and isinstance(cache_seqlens, Tensor), "only pages are used"
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k_cache, v_cache, scale)
        must(page_table.dtype == torch.int32 and page_table.stride(-1) == 1, "page_table must have dtype torch.int32")
        must(cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous(), "seqused_k must have dtype int32")
        batch, capacity = page_table.shape[0], page_table.shape[1] * k_cache.shape[1]
        if cu_seqlens_q is None:
            packed, starts, most = q.flatten(0, 1), [b * q.shape[1] for b in range(batch + 1)], q.shape[1]
        else:
            must(cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.is_contiguous(), "cu_seqlens_q: torch.int32")
            assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
            packed, starts, most = q, cu_seqlens_q.tolist(), max_seqlen_q
        must(most > 0, "invalid grid")
        output = torch.full((*packed.shape[:2], v_cache.shape[3]), torch.nan, dtype=torch.float64)
        for b, length in enumerate(cache_seqlens.tolist()):
            start, end = starts[b], min(starts[b + 1], starts[b] + most)
            allowed = self._reach(end - start, length, most, capacity, causal, window_size)
            kb, vb = pages(k_cache, page_table[b], length), pages(v_cache, page_table[b], length)
            rows = attend(packed[start:end].transpose(0, 1), kb, vb, allowed, scale, softcap)
            output[start:end] = rows.transpose(0, 1)
        return output.view(*q.shape[:-1], v_cache.shape[3]).to(q.dtype)


class FlashAttention4:
    """4.0.0b27: flash_attn/cute/interface.py."""

    def __init__(self, sm: int = 90) -> None:
        self.sm = sm
        self.calls: list[dict[str, Any]] = []

    def module(self) -> types.ModuleType:
        """The module `flash_attn.cute`."""
        module = types.ModuleType("flash_attn.cute")
        module.__dict__.update(flash_attn_func=self.flash_attn_func, flash_attn_varlen_func=self.flash_attn_varlen_func)
        return module

    def _check(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, local: bool, paged: bool) -> None:
        width, v_width, major = q.shape[-1], v.shape[-1], self.sm // 10
        assert major in (8, 9, 10, 11, 12), "Unsupported compute capability"
        assert q.dtype in HALF and k.dtype == q.dtype == v.dtype
        assert q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv"
        assert scale > 0.0, "exp2(score * scale - max(score) * scale) overflows"
        standard = 8 <= width <= 128 and 8 <= v_width <= 128
        assert width % 8 == 0 and v_width % 8 == 0, "divisible by 8"
        if major == 9:
            assert 8 <= width <= 256 and 8 <= v_width <= 256, "not supported on SM90"
        elif major in (10, 11):
            assert standard or (width, v_width) in ((192, 128), (256, 256)), "not supported on SM100/SM110"
            if width == 256:
                assert softcap == 0.0 and not local and not paged, "SM100 forward with head_dim=256 does not support it"
        else:
            assert standard, "not among the sizes it is tuned for"
        assert not paged or major in (9, 10, 11), "paged KV not supported"
        for t in (q, k, v):
            # Before 4.0.0b26 a kernel compiled for an expanded tensor was used for others.
            assert not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)), "expanded"
        loads(q, k, v)

    @staticmethod
    def _reach(seq_q: int, seq_k: int, causal: bool, window: tuple[int | None, int | None]) -> Tensor:
        left, right = window
        assert (left is None or left >= 0) and (right is None or right >= 0), "an open side is None"
        right = 0 if causal else right
        return window_of(seq_q, seq_k, -1 if left is None else left, -1 if right is None else right)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(dict(locals()))
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(
            q, k, v, scale, softcap, window_size != (None, None) and not causal or window_size[0] is not None, False
        )
        allowed = self._reach(q.shape[1], k.shape[1], causal, window_size)
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        sums = log_sums(*heads_first[:2], allowed, scale, softcap, -torch.inf) if return_lse else None
        return attend(*heads_first, allowed, scale, softcap).transpose(1, 2).to(q.dtype), sums

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: list[Tensor] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(dict(locals()))
        assert cu_seqlens_q is not None and (seqused_k is None) == (page_table is None), "only what is used"
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._check(q, k, v, scale, softcap, False, page_table is not None)
        if page_table is not None:
            assert page_table.dtype == torch.int32 and page_table.stride(-1) == 1, "page_table must be int32"
        bounds = seqused_k if cu_seqlens_k is None else cu_seqlens_k
        assert bounds is not None
        for t in (cu_seqlens_q, bounds):
            assert t.dtype == torch.int32 and t.stride(0) == 1, "must be int32 and contiguous"
        starts, most = cu_seqlens_q.tolist(), max_seqlen_q or q.shape[0]
        output = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=torch.float64)
        sums = torch.full((q.shape[1], q.shape[0]), torch.nan)
        for b, length in enumerate(bounds.tolist() if page_table is not None else bounds.diff().tolist()):
            start, end = starts[b], min(starts[b + 1], starts[b] + most)
            allowed = self._reach(end - start, length, causal, window_size)
            if page_table is not None:
                kb, vb = pages(k, page_table[b], length), pages(v, page_table[b], length)
            else:
                assert max_seqlen_k is None or length <= max_seqlen_k, "keys beyond max_seqlen_k are not read"
                kb, vb = tokens(k, bounds, b), tokens(v, bounds, b)
            rows = q[start:end].transpose(0, 1)
            output[start:end] = attend(rows, kb, vb, allowed, scale, softcap).transpose(0, 1)
            sums[:, start:end] = log_sums(rows, kb, allowed, scale, softcap, -torch.inf)
        return output.to(q.dtype), sums if return_lse else None
