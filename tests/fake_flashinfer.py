"""FlashInfer 0.6.18 for the CPU: the signatures of its sources, what those check, and what they compute.

Wrappers compute from what they were planned with, whatever the tensors hold by then. Queries without a key are NaN, and
outputs are written as the kernels write them: some into memory laid out like the query, but in the order of a contiguous
one.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_calls import attend, positions
from fake_flash_attn import HALF, loads, must
from torch import Tensor

VERSION = "0.6.18"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEADS = (64, 128, 256)


def contract_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_left: int, scale: float, softcap: float
) -> Tensor:
    """Queries [n, heads, d] over keys [m, kv_heads, d]; NaN where there is no key."""
    must(scale > 0.0, "the largest score is found among unscaled ones")
    query, key = positions(q.shape[0], k.shape[0])
    allowed = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        allowed &= key <= query
    if window_left >= 0:
        must(causal or q.shape[0] == 1, "windows without causal are not relied on")
        allowed &= key >= query - window_left
    heads_first = (t.transpose(0, 1) for t in (q, k, v))
    output = attend(*heads_first, allowed, scale, softcap).transpose(0, 1)
    return output.masked_fill(~allowed.any(-1)[:, None, None], torch.nan)


def lse_of(q: Tensor, k: Tensor, causal: bool, scale: float, softcap: float) -> Tensor:
    """The logarithms, to base 2, of the sums of exponentials: [n, heads]; minus infinity where there is no key."""
    scores = scale * torch.einsum("nhd,mhd->nhm", q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1))
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        query, key = positions(q.shape[0], k.shape[0])
        scores = scores.masked_fill((key > query)[:, None], -torch.inf)
    return torch.logsumexp(scores, -1) / math.log(2.0)


def written_like(q: Tensor, rows: Tensor) -> Tensor:
    """An output in memory like the query's, written in the order of a contiguous one."""
    out = torch.empty_like(q)
    out.as_strided(rows.shape, rows.contiguous().stride()).copy_(rows)
    return out


def maps(*tensors: Tensor) -> None:
    """What Hopper's copy engine reads it reads by a tensor map; one that cannot be made is printed, and used."""
    loads(*tensors)
    for t in tensors:
        strides = [stride * t.element_size() for stride in t.stride()[:-1]]
        must(all(stride > 0 and stride % 16 == 0 for stride in strides), "Failed to initialize the TMA descriptor")


def indices(*tensors: Tensor) -> None:
    """Index arrays are int32."""
    must(all(t.dtype == torch.int32 for t in tensors), "must be int32")


class Wrapper:
    """What all wrappers do."""

    library: FlashInfer

    def _made(self, workspace: Tensor) -> None:
        must(workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20, "a workspace of 128 MB")
        must(workspace.data_ptr() % 16 == 0, "16-byte aligned")
        self.workspace = workspace
        self.planned: dict[str, Any] | None = None
        self.library.made.append(self)

    def _plan(self, **kept: Any) -> None:
        self.library.plans.append(type(self).__name__)
        self.planned = {key: v.clone() if isinstance(v, Tensor) else v for key, v in kept.items()}

    def _ran(self) -> dict[str, Any]:
        must(self.planned is not None, "plan info is not initialized")
        assert self.planned is not None
        self.library.runs.append(type(self).__name__)
        return self.planned


def scale_of(scale: float | None, head_dim: int) -> float:
    """The default scale."""
    return head_dim**-0.5 if scale is None else scale


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
        indices_: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
        indices(indptr, indices_, last_page_len)
        must(head_dim in HEADS, f"Unsupported head_dim: {head_dim}")
        must(self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "Unsupported group_size")
        must(int(indptr[-1]) == len(indices_) and int(indptr[-1]) > 0, "indptr ends where indices do")
        scale, cap = scale_of(sm_scale, head_dim), logits_soft_cap or 0.0
        self._plan(
            indptr=indptr, indices=indices_, last=last_page_len, window=window_left, scale=scale, softcap=cap,
            page_size=page_size, q=q_data_type, kv=kv_data_type, sizes=(num_qo_heads, num_kv_heads, head_dim),
        )  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, **keywords: Any) -> Tensor:
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
        **more: Any,
    ) -> None:
        indices(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        must(head_dim_qk in HEADS and not more, f"Unsupported head_dim: {head_dim_qk}")
        must(len(paged_kv_last_page_len) <= 32768, "_kv_lens_buffer has room for 32768")
        must(int(qo_indptr[0]) == 0, "queries begin at the first row")
        scale, cap = scale_of(sm_scale, head_dim_qk), logits_soft_cap or 0.0
        self._plan(
            qo=qo_indptr, indptr=paged_kv_indptr, indices=paged_kv_indices, last=paged_kv_last_page_len, causal=causal,
            window=window_left, scale=scale, softcap=cap, q=q_data_type, kv=kv_data_type,
        )  # fmt: skip

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, return_lse: bool = False, **keywords: Any
    ) -> Any:
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
        level = type("Level", (BatchPrefillWithPagedKVCacheWrapper,), {"library": FlashInfer()})
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


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """flashinfer/prefill.py."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._made(float_workspace_buffer)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        **more: Any,
    ) -> None:
        indices(qo_indptr, kv_indptr)
        must((head_dim_qk, head_dim_vo) in {(n, n) for n in HEADS} | {(192, 128)} and not more, "head_dim")
        scale, cap = scale_of(sm_scale, head_dim_qk), logits_soft_cap or 0.0
        self._plan(
            qo=qo_indptr, kv=kv_indptr, causal=causal, window=window_left, scale=scale, softcap=cap, q=q_data_type
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
        plan = self._ran()
        maps(q, k, v)
        must(q.dtype == plan["q"] == k.dtype, "does not match the data type specified in plan")
        must(q.shape[0] == int(plan["qo"][-1]) and k.shape[0] == int(plan["kv"][-1]), "rows")
        rows, ends, starts = [], plan["qo"].tolist(), plan["kv"].tolist()
        for b in range(len(ends) - 1):
            part, keys = q[ends[b] : ends[b + 1]], slice(starts[b], starts[b + 1])
            rows.append(
                contract_of(part, k[keys], v[keys], plan["causal"], plan["window"], plan["scale"], plan["softcap"])
            )
        return torch.cat(rows).to(q.dtype)


class BatchMLAPagedAttentionWrapper(Wrapper):
    """flashinfer/mla/_core.py."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._made(float_workspace_buffer)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        indices(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        must((head_dim_ckv, head_dim_kpe) == (512, 64) and kv_data_type in HALF, "only DeepSeek's")
        must(int(qo_indptr[0]) == 0, "queries begin at the first row")
        self._plan(
            qo=qo_indptr, indptr=kv_indptr, indices=kv_indices, lengths=kv_len_arr, page_size=page_size, causal=causal,
            scale=sm_scale, q=q_data_type, kv=kv_data_type,
        )  # fmt: skip

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor | None = None
    ) -> Tensor:
        plan = self._ran()
        loads(q_nope, q_pe, ckv_cache, kpe_cache)
        must(q_nope.dtype == plan["q"] and ckv_cache.dtype == plan["kv"], "does not match the planned dtype")
        must(ckv_cache.shape[1] == plan["page_size"], "page_size")
        rows, ends = [], plan["qo"].tolist()
        for b, length in enumerate(plan["lengths"].tolist()):
            used = plan["indices"][plan["indptr"][b] :][: -(-length // plan["page_size"])].long()
            latent = ckv_cache[used].flatten(0, 1)[:length]
            key = torch.cat((latent, kpe_cache[used].flatten(0, 1)[:length]), -1)
            query = torch.cat((q_nope[ends[b] : ends[b + 1]], q_pe[ends[b] : ends[b + 1]]), -1)
            rows.append(contract_of(query, key[:, None], latent[:, None], plan["causal"], -1, plan["scale"], 0.0))
        output = torch.empty_like(q_nope)
        output[: ends[-1]] = torch.cat(rows).to(q_nope.dtype)
        return output


class BlockSparseAttentionWrapper(Wrapper):
    """flashinfer/sparse.py."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self._made(float_workspace_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices_: Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
    ) -> None:
        indices(indptr, indices_)
        must(head_dim in HEADS and int(indices_.max()) * C < N and o_data_type == q_data_type, "indices out of bound")
        must(R == 1 or R * (num_qo_heads // num_kv_heads) >= 4, "one row is planned for each block, and all are run")
        scale = scale_of(sm_scale, head_dim)
        self._plan(indptr=indptr, indices=indices_, R=R, C=C, scale=scale, q=q_data_type, rows=M)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
        plan = self._ran()
        loads(k, v)
        maps(q)
        must(q.dtype == plan["q"] and q.shape[0] == plan["rows"], "does not match the plan")
        blocks = [t.reshape(-1, plan["C"], *t.shape[1:]) for t in (k, v)]
        rows = []
        for i in range(len(plan["indptr"]) - 1):
            listed = plan["indices"][plan["indptr"][i] : plan["indptr"][i + 1]].long()
            # A block that is listed twice counts twice.
            keys, values = (t[listed].flatten(0, 1) for t in blocks)
            part = q[i * plan["R"] : (i + 1) * plan["R"]]
            rows.append(contract_of(part, keys, values, False, -1, plan["scale"], 0.0))
        return written_like(q, torch.cat(rows).to(q.dtype))


class VariableBlockSparseAttentionWrapper(Wrapper):
    """flashinfer/sparse.py."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self._made(float_workspace_buffer)

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        indices(block_row_sz, block_col_sz)
        must(head_dim in HEADS and block_mask_map.dtype == torch.bool, "head_dim")
        must(bool((block_mask_map * block_col_sz[:, None]).any()), "index -1 is out of bounds for dimension 0")
        must(block_row_sz.numel() <= 32768, "_kv_lens_buffer has room for 32768")
        scale = scale_of(sm_scale, head_dim)
        self._plan(mask=block_mask_map, rows=block_row_sz, columns=block_col_sz, scale=scale, q=q_data_type)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Tensor:
        plan = self._ran()
        loads(q, k, v)
        must(q.dtype == plan["q"], "does not match the plan")
        # Heads lie one after another: rows are told apart by the sizes alone.
        must(bool((plan["rows"].sum(1) == q.shape[1]).all()), "rows of a head run into the next")
        must(bool((plan["columns"].sum(1) == k.shape[1]).all()), "columns of a head run into the next")
        group, parts = q.shape[0] // k.shape[0], []
        for head in range(k.shape[0]):
            wide = plan["mask"][head].repeat_interleave(plan["rows"][head], 0)
            wide = wide.repeat_interleave(plan["columns"][head], 1)
            part = attend(
                q[head * group : (head + 1) * group], k[head : head + 1], v[head : head + 1], wide, plan["scale"]
            )
            parts.append(part.masked_fill(~wide.any(-1)[:, None], torch.nan))
        return torch.cat(parts).to(q.dtype)


class FlashInfer:
    """The library: its functions and classes, and what was done with them."""

    def __init__(
        self, sm: int = 90, compiler: bool = True, cached: Path | None = None, shipped: Path | None = None
    ) -> None:
        self.sm, self.compiler, self.cached, self.shipped = sm, compiler, cached, shipped
        self.made: list[Wrapper] = []
        self.plans: list[str] = []
        self.runs: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        """Its modules by name."""
        names = ("flashinfer", "flashinfer.jit", "flashinfer.jit.env", "flashinfer.jit.cpp_ext")
        made = {name: types.ModuleType(name) for name in names}
        wrappers = {w.__name__: type(w.__name__, (w,), {"library": self}) for w in Wrapper.__subclasses__()}
        latent = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=wrappers.pop("BatchMLAPagedAttentionWrapper"))
        made["flashinfer"].__dict__.update(
            wrappers,
            __version__=VERSION,
            mla=latent,
            merge_state_in_place=merge_state_in_place,
            single_prefill_with_kv_cache=self.single_prefill_with_kv_cache,
        )
        made["flashinfer.jit.env"].__dict__.update(
            has_flashinfer_jit_cache=lambda: False,
            FLASHINFER_JIT_DIR=self.cached or Path("/nowhere"),
            FLASHINFER_AOT_DIR=self.shipped or Path("/nowhere"),
        )
        made["flashinfer.jit.cpp_ext"].__dict__["get_cuda_path"] = self.get_cuda_path
        return made

    def get_cuda_path(self) -> str:
        """flashinfer/jit/cpp_ext.py."""
        must(self.compiler, "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")
        return "/usr/local/cuda"

    def single_prefill_with_kv_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        o_dtype: torch.dtype | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        kv_layout: str = "NHD",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        backend: str = "auto",
        return_lse: bool = False,
        kv_cache_sf: Any = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> Tensor:
        """flashinfer/prefill.py."""
        self.calls.append(dict(locals()))
        must(q.dtype in HALF and (q.dtype == torch.float16 or self.sm >= 80), "dtype")
        must((q.shape[-1], v.shape[-1]) in {(n, n) for n in HEADS} | {(192, 128)}, "head_dim")
        maps(q, k, v)
        # csrc/single_prefill_sm90.cu, up to 0.7.2: strides go by the layout, sizes do not.
        kv_len, kv_heads = k.shape[:2]
        must(q.shape[1] // kv_heads > 0, "SIGFPE: cutlass::FastDivmod(0)")
        if kv_layout == "HND":
            k, v = (t.transpose(0, 1)[:kv_len] for t in (k, v))
        scale = scale_of(sm_scale, q.shape[-1])
        return contract_of(q, k, v, causal, window_left, scale, logits_soft_cap or 0.0).to(q.dtype)


def install(monkeypatch: pytest.MonkeyPatch, library: FlashInfer) -> FlashInfer:
    """Puts a library in place and has the adapter find it, with no plan made yet."""
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert importlib.import_module("layerzero.backends.flashinfer.adapter").detect() == VERSION
    plans = importlib.import_module("layerzero.backends.flashinfer.plans")
    plans.plans.__dict__.clear()
    plans.plans.__init__()
    return library
