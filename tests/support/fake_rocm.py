"""AITER and FlashAttention for ROCm on the CPU: the signatures of their sources, and what those compute.

Computed is what the sources do, not what is asked of them: what a library passes over in silence is passed over here.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from attention_calls import attend, positions
from fake_flash_attn import HALF, loads, must, window_of
from torch import Tensor


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None, allowed: Tensor, alibi_slopes: Tensor | None) -> Tensor:
    """Attention of sequence-first tensors."""
    must(q.dtype in HALF and k.dtype == q.dtype == v.dtype, "only fp16 and bf16")
    must(max(q.shape[-1], v.shape[-1]) <= 256, "CK only supports head dimension at most 256")
    must(q.shape[2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    if q.shape[-1] % 8 == 0:
        loads(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    must(scale > 0.0, "the largest score is sought among unscaled ones")
    bias = None
    if alibi_slopes is not None:
        must(alibi_slopes.dtype == torch.float32 and alibi_slopes.is_contiguous(), "ALiBi slopes")
        query, key = positions(q.shape[1], k.shape[1])
        bias = -alibi_slopes.double()[:, None, None] * (query - key).abs()
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return attend(*heads_first, allowed, scale, 0.0, bias).transpose(1, 2).to(q.dtype)


class Aiter:
    """v0.1.20: aiter/ops/mha.py, rmsnorm.py, norm.py and rope.py."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules."""
        made = {name: types.ModuleType(name) for name in ("aiter", "aiter.ops", "aiter.ops.mha")}
        made["aiter"].__dict__.update({name: getattr(self, name) for name in dir(self) if "_f" in name})
        made["aiter.ops.mha"].__dict__["ENABLE_CK"] = True
        return made

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, ...] = (-1, -1, 0),
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        how_v3_bf16_cvt: int = 1,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        sink_ptr: Tensor | None = None,
        num_splits: int = 0,
    ) -> Tensor:
        self.calls.append(dict(locals()))
        must(v.shape[-1] == q.shape[-1] or (q.shape[-1], v.shape[-1]) == (192, 128), "no such kernel")
        seq_q, seq_k = q.shape[1], k.shape[1]
        left, right = (-1 if side >= seq_k else side for side in window_size[:2])
        if left <= 0 and right <= 0:
            # Kernels that know the causal flag and no window.
            left = -1
            right = 0 if causal else -1
            must(not causal or seq_q <= seq_k, "rows that reach nothing")
        return dense(q, k, v, softmax_scale, window_of(seq_q, seq_k, left, 0 if causal else right), alibi_slopes)

    def rmsnorm2d_fwd(
        self, input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
    ) -> Tensor:
        self._check(input, weight)
        return rms(input, weight, epsilon)

    def rmsnorm2d_fwd_with_add(
        self,
        out: Tensor,
        input: Tensor,
        residual_in: Tensor,
        residual_out: Tensor,
        weight: Tensor,
        epsilon: float,
        gemma_norm: bool = False,
        use_model_sensitive_rmsnorm: int = 0,
    ) -> None:
        self._check(input, weight)
        must(not gemma_norm and not use_model_sensitive_rmsnorm, "another norm")
        residual_out.copy_(input + residual_in)
        out.copy_(rms(residual_out, weight, epsilon))

    def layernorm2d_fwd(
        self, input: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, x_bias: Tensor | None = None
    ) -> Tensor:
        self._check(input, weight)
        wide = (t.float() for t in (weight, bias))
        return torch.nn.functional.layer_norm(input.float(), input.shape[-1:], *wide, epsilon).to(input.dtype)

    @staticmethod
    def _check(input: Tensor, weight: Tensor) -> None:
        must(input.dim() == 2 and input.is_contiguous() and weight.dtype == input.dtype, "two dimensions, one dtype")
        must(input.dtype in HALF and input.shape[-1] <= 8192, "not support n")

    def rope_cached_fwd(
        self,
        input: Tensor,
        cos: Tensor,
        sin: Tensor,
        rotate_style: int,
        reuse_freqs_front_part: bool,
        nope_first: bool,
        transpose_output: bool = False,
    ) -> Tensor:
        must(cos.shape[0] == input.shape[0], "a row for each token")
        places = torch.arange(input.shape[0])[:, None].expand(input.shape[:2])
        return self._turn(input, cos, sin, places, rotate_style, reuse_freqs_front_part, nope_first)

    def rope_cached_positions_fwd(
        self,
        input: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        rotate_style: int,
        reuse_freqs_front_part: bool,
        nope_first: bool,
        transpose_output: bool = False,
    ) -> Tensor:
        must(positions.dtype == torch.int64 and positions.is_contiguous(), "does not support positions dtype")
        return self._turn(input, cos, sin, positions, rotate_style, reuse_freqs_front_part, nope_first)

    @staticmethod
    def _turn(
        input: Tensor, cos: Tensor, sin: Tensor, places: Tensor, style: int, front: bool, nope_first: bool
    ) -> Tensor:
        must(front and not nope_first and cos.dtype == input.dtype, "another rotation")
        must(cos.is_contiguous() and sin.is_contiguous() and cos.shape[1:3] == (1, 1), "tables are read row by row")
        must(input.stride(-1) == 1 and places.shape == input.shape[:2], "requires all stride_d to be 1")
        pairs, output = cos.shape[-1], torch.empty_like(input)
        c, s = (table.view(-1, pairs)[places][:, :, None].float() for table in (cos, sin))
        at = slice(0, pairs) if style == 0 else slice(0, 2 * pairs, 2)
        other = slice(pairs, 2 * pairs) if style == 0 else slice(1, 2 * pairs, 2)
        first, second = input[..., at].float(), input[..., other].float()
        output[..., at] = (first * c - second * s).to(input.dtype)
        output[..., other] = (second * c + first * s).to(input.dtype)
        output[..., 2 * pairs :] = input[..., 2 * pairs :]
        return output


class FlashAttention:
    """v2.8.3: flash_attn/flash_attn_interface.py over csrc/flash_attn_ck, or over flash_attn_triton_amd."""

    def __init__(self, triton: bool) -> None:
        self.triton = triton
        self.calls: list[dict[str, Any]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules."""
        interface = types.ModuleType("flash_attn.flash_attn_interface")
        interface.__dict__.update(USE_TRITON_ROCM=self.triton, flash_attn_func=self.flash_attn_func)
        return {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.flash_attn_interface": interface}

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
    ) -> Tensor:
        self.calls.append(dict(locals()))
        must(
            dropout_p == 0.0 and k.shape == v.shape, "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)"
        )
        seq_q, seq_k = q.shape[1], k.shape[1]
        # Triton knows no window; neither knows a softcap.
        left, right = (-1, -1) if self.triton else (-1 if side >= seq_k else side for side in window_size)
        must(not causal or seq_q <= seq_k, "rows that reach nothing")
        return dense(q, k, v, softmax_scale, window_of(seq_q, seq_k, left, 0 if causal else right), alibi_slopes)
