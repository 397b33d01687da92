"""Gaudi's fused kernels on the CPU: the signatures vllm-gaudi and optimum-habana call, and what they compute."""

from __future__ import annotations

import types
from enum import Enum
from typing import Any

import torch
from attention_calls import attend
from fake_flash_attn import must
from torch import Tensor

Mode = Enum("Mode", ["BLOCKWISE", "PAIRWISE"])
WIDE = (torch.float32, torch.bfloat16)


class Habana:
    """`habana_frameworks.torch.hpex`, and what was called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules."""
        kernels = types.ModuleType("habana_frameworks.torch.hpex.kernels")
        kernels.__dict__.update(
            FusedSDPA=types.SimpleNamespace(apply=self.sdpa),
            RotaryPosEmbeddingMode=Mode,
            apply_rotary_pos_emb=self.rotate,
        )
        normalization = types.ModuleType("habana_frameworks.torch.hpex.normalization")
        normalization.__dict__.update(FusedRMSNorm=types.SimpleNamespace(apply=self.rms_norm))
        packages = ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpex")
        made = {name: types.ModuleType(name) for name in packages}
        return {**made, kernels.__name__: kernels, normalization.__name__: normalization}

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = None,
        valid_sequence_lengths: Tensor | None = None,
        padding_side: str = "left",
    ) -> Tensor:
        self.calls.append(dict(locals()))
        must(query.dtype in WIDE and query.dtype == key.dtype == value.dtype, "dtype")
        must(dropout_p == 0.0 and softmax_mode == "None" and recompute is True, "another softmax")
        must(attn_mask is None or not is_causal, "causal + attn_bias is not yet supported")
        seq_q, seq_k = query.shape[2], key.shape[2]
        must(not is_causal or seq_q == seq_k, "causal masking requires inputs to be of the same length")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        must(scale > 0.0, "scale")
        bias = None
        allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
        if attn_mask is not None:
            must(attn_mask.dim() == 4 and attn_mask.dtype == query.dtype, "mask")
            must(attn_mask.shape[2:] == (seq_q, seq_k), "mask")
            bias, allowed = attn_mask.double(), attn_mask != -torch.inf
        output = attend(query, key, value, allowed.tril() if is_causal else allowed, scale, 0.0, bias)
        if attn_mask is not None:
            # A row that reaches nothing is not a number.
            output = output.masked_fill(~allowed.any(-1, keepdim=True), torch.nan)
        return output.to(query.dtype)

    @staticmethod
    def rms_norm(data_in: Tensor, gamma: Tensor, eps: float, use_stages: bool = True, bwd_mode: int = 0) -> Tensor:
        must(data_in.dim() == 3 and data_in.dtype == gamma.dtype, "requires 3D tensors as inputs")
        wide = data_in.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gamma.float()).to(data_in.dtype)

    @staticmethod
    def rotate(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, offset: int, mode: Mode) -> Tensor:
        must(position_ids is None and offset == 0 and p.dtype == cos.dtype == sin.dtype, "positions")
        must(cos.shape == (p.shape[0], 1, p.shape[-1]), "cos and sin are as wide as what is turned")
        half = p.shape[-1] // 2
        wide = p.float()
        if mode is Mode.BLOCKWISE:
            turned = torch.cat((-wide[..., half:], wide[..., :half]), -1)
        else:
            turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
        return (wide * cos.float() + turned * sin.float()).to(p.dtype)
