"""xFormers 0.0.35 for the CPU: the signatures of its sources, what its operators check, and what they compute.

Queries that may attend to nothing are NaN in the CUTLASS operator, as a division of nothing by nothing is.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from attention_calls import attend, positions
from fake_flash_attn import HALF, FlashAttention2, loads
from torch import Tensor


class LowerTriangularFromBottomRightMask:
    """xformers/ops/fmha/attn_bias.py."""


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """xformers/ops/fmha/attn_bias.py: the window counts the query's own position."""

    _window_size: int

    def __post_init__(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")


@dataclass
class LocalAttentionFromBottomRightMask:
    """xformers/ops/fmha/attn_bias.py."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value passed to `LocalAttentionFromBottomRightMask`")


class Operator:
    """A forward or backward operator."""

    def __init__(self, name: str, available: bool = True) -> None:
        self.NAME = name
        self._available = available

    def is_available(self) -> bool:
        """Whether it was built."""
        return self._available


class Xformers:
    """v0.0.35: xformers/ops/fmha."""

    def __init__(self, sm: int = 80, available: bool = True, problem: Exception | None = None) -> None:
        self.sm = sm
        self.problem = problem
        self.calls: list[dict[str, Any]] = []
        self.flash = (Operator("fa2F@2.5.7-pt", available), Operator("fa2B@2.5.7-pt", available))
        self.cutlass = (Operator("cutlassF-pt"), Operator("cutlassB-pt"))

    def modules(self) -> dict[str, types.ModuleType]:
        """Its modules by name."""
        made = {
            name: types.ModuleType(name)
            for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers._cpp_lib")
        }
        made["xformers"].__dict__["__version__"] = "0.0.35"
        made["xformers._cpp_lib"].__dict__["_cpp_library_load_exception"] = self.problem
        made["xformers.ops.fmha"].__dict__.update(
            memory_efficient_attention=self.memory_efficient_attention,
            flash=types.SimpleNamespace(FwOp=self.flash[0], BwOp=self.flash[1]),
            cutlass=types.SimpleNamespace(FwOp=self.cutlass[0], BwOp=self.cutlass[1]),
            attn_bias=types.SimpleNamespace(
                LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
                LowerTriangularFromBottomRightLocalAttentionMask=LowerTriangularFromBottomRightLocalAttentionMask,
                LocalAttentionFromBottomRightMask=LocalAttentionFromBottomRightMask,
            ),
        )
        return made

    def memory_efficient_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        self.calls.append(dict(locals()))
        # Inputs.validate_inputs: nothing is broadcast.
        lead = query.shape[:1], query.shape[2:-1]
        if (key.shape[:1], key.shape[2:-1]) != lead or (value.shape[:1], value.shape[2:-1]) != lead:
            raise ValueError("Incompatible shapes for attention inputs")
        assert key.dtype == query.dtype == value.dtype and key.shape[1] == value.shape[1]
        used = query.shape[-1] ** -0.5 if scale is None else scale
        assert used > 0.0
        grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        run = self._flash if op == self.flash else self._cutlass
        return run(query, key, value, attn_bias, p, used, grads).to(query.dtype)

    @staticmethod
    def _kept(query: Tensor, seq_k: int, p: float) -> Tensor | None:
        if p == 0.0:
            return None
        return (torch.rand(query.shape[0], query.shape[2], query.shape[1], seq_k) >= p) / (1.0 - p)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, p: float, scale: float, grads: bool) -> Tensor:
        assert self.sm >= 80 and q.dtype in HALF and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
        shape = q.shape
        if q.dim() == 5:
            assert not grads, "operator does not support BMGHK format"
            assert q.stride(2) == q.stride(3) * q.shape[3] or q.shape[2] == 1, "the G/H dimensions are contiguous"
            assert k.stride(3) == 0 and v.stride(3) == 0
            q, k, v = q.reshape(*q.shape[:2], -1, q.shape[4]), k[:, :, :, 0], v[:, :, :, 0]
        loads(q, k, v)
        causal = isinstance(bias, LowerTriangularFromBottomRightMask)
        window = (-1, -1)
        if isinstance(bias, LowerTriangularFromBottomRightLocalAttentionMask):
            window = (bias._window_size - 1, -1)
        elif isinstance(bias, LocalAttentionFromBottomRightMask):
            window = (bias.window_left, bias.window_right)
        else:
            assert bias is None or causal, f"attn_bias type is {type(bias)}"
        seq_q, seq_k = q.shape[1], k.shape[1]
        allowed = FlashAttention2._reach(seq_q, seq_k, seq_k, causal, window, False)
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        output = attend(*heads_first, allowed, scale, kept=self._kept(q, seq_k, p))
        return output.transpose(1, 2).reshape(shape)

    def _cutlass(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, p: float, scale: float, grads: bool) -> Tensor:
        assert 50 <= self.sm <= 90 and q.dtype in (torch.float32, *HALF) and q.dim() == 4
        assert q.dtype != torch.bfloat16 or self.sm >= 80, "bf16 is only supported on A100+ GPUs"
        step = 16 // q.element_size()
        assert q.shape[-1] % step == 0 and v.shape[-1] % step == 0
        loads(q, k, v)
        seq_q, seq_k = q.shape[1], k.shape[1]
        query, key = positions(seq_q, seq_k)
        allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
        added = None
        if isinstance(bias, Tensor):
            assert not grads and bias.dtype == q.dtype
            if tuple(bias.shape) != (q.shape[0], q.shape[2], seq_q, seq_k):
                raise ValueError(f"Invalid shape for attention bias: {bias.shape}")
            assert bias.stride(-1) == 1 and not any(stride % step for stride in bias.stride()[:-1])
            added = bias.double()
        elif isinstance(bias, LowerTriangularFromBottomRightLocalAttentionMask):
            assert not grads, "infs/nans in the BW pass for local + causal"
            allowed = (key <= query) & (key > query - bias._window_size)
        elif isinstance(bias, LowerTriangularFromBottomRightMask):
            allowed = key <= query
        else:
            assert bias is None, f"attn_bias type is {type(bias)}"
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        output = attend(*heads_first, allowed, scale, bias=added, kept=self._kept(q, seq_k, p))
        nothing = ~allowed if added is None else ~allowed | (added == -torch.inf)
        empty = nothing.all(-1, keepdim=True).expand(*output.shape[:3], 1)
        return output.masked_fill(empty, torch.nan).transpose(1, 2)
