"""FlashInfer's wrappers for paged caches, for the CPU: decoding, prefill and the cascade."""

from __future__ import annotations

from typing import Any

import torch
from fake_flash_attn import HALF, loads, must
from fake_flashinfer_wrapper import (
    HEADS,
    Wrapper,
    check_indices,
    contract_of,
    lse_of,
    maps,
    not_imitated,
    scale_of,
    written_like,
)
from torch import Tensor


def gather(cache: Tensor, plan: dict[str, Any], b: int, layout: str) -> Tensor:
    """The tokens of a sequence, [tokens, heads, d]."""
    pages = cache if layout == "NHD" else cache.transpose(1, 2)
    used = plan["indices"][plan["indptr"][b] : plan["indptr"][b + 1]].long()
    tokens = max(len(used) - 1, 0) * pages.shape[1] + int(plan["last"][b])
    return pages[used].flatten(0, 1)[:tokens]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """flashinfer/decode.py."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self._made(float_workspace_buffer)
        self.layout, self.tensor_cores = kv_layout, use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        not_imitated(*deprecated_positional_args)
        self._options(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _options(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        check_indices(indptr, indices, last_page_len)
        must(head_dim in HEADS, f"Unsupported head_dim: {head_dim}")
        must(self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "Unsupported group_size")
        must(int(indptr[-1]) == len(indices) and int(indptr[-1]) > 0, "indptr ends where indices do")
        scale, cap = scale_of(sm_scale, head_dim), logits_soft_cap or 0.0
        self._plan(
            indptr=indptr, indices=indices, last=last_page_len, window=window_left, scale=scale, softcap=cap,
            page_size=page_size, q=q_data_type, kv=kv_data_type, sizes=(num_qo_heads, num_kv_heads, head_dim),
        )  # fmt: skip

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor:
        not_imitated(*args, q_scale, k_scale, v_scale, out, lse, return_lse, window_left, sinks, q_len_per_req)
        plan, (k, v) = self._ran(), paged_kv_cache
        loads(q, k, v)
        must(q.dtype == plan["q"] and k.dtype == plan["kv"], "does not match the data type specified in plan")
        must(k.stride() == v.stride(), "K/V strides differ")
        must(q.shape[0] == len(plan["last"]), "q.shape[0] does not match batch_size")
        rows = []
        for b in range(q.shape[0]):
            kb, vb = gather(k, plan, b, self.layout), gather(v, plan, b, self.layout)
            rows.append(contract_of(q[b : b + 1], kb, vb, False, plan["window"], plan["scale"], plan["softcap"]))
        return written_like(q, torch.cat(rows).to(q.dtype))


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """flashinfer/prefill.py."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._made(float_workspace_buffer)
        self.layout, self.backend = kv_layout, backend

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        check_indices(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        not_imitated(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, seq_lens)
        not_imitated(seq_lens_q, block_tables, fixed_split_size, disable_split_kv)
        must(head_dim_qk in HEADS, f"Unsupported head_dim: {head_dim_qk}")
        must(len(paged_kv_last_page_len) <= 32768, "_kv_lens_buffer has room for 32768")
        must(int(qo_indptr[0]) == 0, "queries begin at the first row")
        scale, cap = scale_of(sm_scale, head_dim_qk), logits_soft_cap or 0.0
        self._plan(
            qo=qo_indptr, indptr=paged_kv_indptr, indices=paged_kv_indices, last=paged_kv_last_page_len, causal=causal,
            window=window_left, scale=scale, softcap=cap, q=q_data_type, kv=kv_data_type,
        )  # fmt: skip

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        not_imitated(*args, q_scale, k_scale, v_scale, out, lse, window_left, sinks, kv_cache_sf, use_fp16_softmax)
        plan, (k, v) = self._ran(), paged_kv_cache
        loads(q, k, v)
        must(q.dtype == plan["q"] and k.dtype == plan["kv"], "does not match the data type specified in plan")
        maps(q)
        must(k.stride() == v.stride(), "K and V must have same page stride for sparse attention")
        must(q.shape[0] == int(plan["qo"][-1]), "q.shape[0] does not match qo_indptr[-1]")
        rows, sums, ends = [], [], plan["qo"].tolist()
        for b in range(len(plan["last"])):
            kb, vb = gather(k, plan, b, self.layout), gather(v, plan, b, self.layout)
            part = q[ends[b] : ends[b + 1]]
            rows.append(contract_of(part, kb, vb, plan["causal"], plan["window"], plan["scale"], plan["softcap"]))
            sums.append(lse_of(part, kb, plan["causal"], plan["scale"], plan["softcap"]))
        output = torch.cat(rows).to(q.dtype)
        return (output, torch.cat(sums).float()) if return_lse else output


class Unheard:
    """A library whose own calls of itself are not looked at."""

    def __init__(self) -> None:
        self.made: list[Wrapper] = []
        self.plans: list[str] = []
        self.runs: list[str] = []


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """flashinfer/cascade.py."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        self._made(float_workspace_buffer)
        level = type("Level", (BatchPrefillWithPagedKVCacheWrapper,), {"library": Unheard()})
        self.levels = [level(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        given = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for level, arrays in zip(self.levels, zip(*given, strict=True), strict=True):
            level.plan(
                *arrays, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and level is self.levels[-1], sm_scale=sm_scale, window_left=window_left,
                logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
            )  # fmt: skip
        self._plan(levels=[int(arrays[-1]) for arrays in paged_kv_indptr_arr])

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        self._ran()
        must(q.is_contiguous(), "v must be contiguous")
        out, lse = self.levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self.levels[:-1]:
            # Results are rounded before they are merged.
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """flashinfer/cascade.py, csrc/cascade.cu."""
    must(all(t.is_contiguous() for t in (v, s, v_other, s_other)), "must be contiguous")
    must(s.dtype == s_other.dtype == torch.float32 and v.dtype in HALF, "unsupported data type")
    must(v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2] and mask is None, "shape")
    must(v.shape[1] * v.shape[2] // 8 <= 1024, "MergeStateInPlace kernel launch failed: invalid argument")
    most = torch.maximum(s, s_other)
    ours, theirs = torch.exp2(s - most), torch.exp2(s_other - most)
    v.copy_((v * ours[..., None] + v_other * theirs[..., None]) / (ours + theirs)[..., None])
    s.copy_(torch.log2(ours + theirs) + most)
