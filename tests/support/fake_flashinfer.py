"""FlashInfer 0.6.18 for the CPU: the signatures of its sources, what those check, and what they compute.

Wrappers compute from what they were planned with, whatever the tensors hold by then. Queries without a key are NaN, and
outputs are written as the kernels write them: some into memory laid out like the query, but in the order of a contiguous
one.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_calls import attend
from fake_flash_attn import HALF, loads, must
from fake_flashinfer_pages import merge_state_in_place
from fake_flashinfer_wrapper import (
    HEADS,
    Wrapper,
    check_indices,
    contract_of,
    maps,
    not_imitated,
    scale_of,
    written_like,
)
from torch import Tensor

VERSION = "0.6.18"


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
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        check_indices(qo_indptr, kv_indptr)
        must((head_dim_qk, head_dim_vo) in {(n, n) for n in HEADS} | {(192, 128)}, "head_dim")
        not_imitated(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        not_imitated(fixed_split_size, disable_split_kv, seq_lens, seq_lens_q, v_indptr, o_indptr)
        scale, cap = scale_of(sm_scale, head_dim_qk), logits_soft_cap or 0.0
        self._plan(
            qo=qo_indptr, kv=kv_indptr, causal=causal, window=window_left, scale=scale, softcap=cap, q=q_data_type
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor:
        not_imitated(*args, q_scale, k_scale, v_scale, o_scale, out, lse, return_lse, kv_cache_sf)
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
        check_indices(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        must((head_dim_ckv, head_dim_kpe) == (512, 64) and kv_data_type in HALF, "only DeepSeek's")
        must(int(qo_indptr[0]) == 0, "queries begin at the first row")
        self._plan(
            qo=qo_indptr, indptr=kv_indptr, indices=kv_indices, lengths=kv_len_arr, page_size=page_size, causal=causal,
            scale=sm_scale, q=q_data_type, kv=kv_data_type,
        )  # fmt: skip

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor:
        not_imitated(out, lse, return_lse, kv_len, page_table, o_scale, ckv_scale, ckv_scale_arr, kpe_scale)
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
        indices: Tensor,
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
        block_mask: Tensor | None = None,
    ) -> None:
        check_indices(indptr, indices)
        not_imitated(mask, packed_mask, block_mask)
        must(head_dim in HEADS and int(indices.max()) * C < N and o_data_type == q_data_type, "indices out of bound")
        must(R == 1 or R * (num_qo_heads // num_kv_heads) >= 4, "one row is planned for each block, and all are run")
        scale = scale_of(sm_scale, head_dim)
        self._plan(indptr=indptr, indices=indices, R=R, C=C, scale=scale, q=q_data_type, rows=M)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        not_imitated(scale_q, scale_k, scale_v, out, lse, return_lse)
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
        check_indices(block_row_sz, block_col_sz)
        must(head_dim in HEADS and block_mask_map.dtype == torch.bool, "head_dim")
        must(bool((block_mask_map * block_col_sz[:, None]).any()), "index -1 is out of bounds for dimension 0")
        must(block_row_sz.numel() <= 32768, "_kv_lens_buffer has room for 32768")
        scale = scale_of(sm_scale, head_dim)
        self._plan(mask=block_mask_map, rows=block_row_sz, columns=block_col_sz, scale=scale, q=q_data_type)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        not_imitated(out, lse, return_lse)
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
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    plans.plans.__dict__.clear()
    plans.plans.__init__()
    return library
