"""PyTorch's own kernels for the CPU, and compositions of them."""

from collections.abc import Callable
from typing import Any

import torch

from .._shared.torch_functions import (
    attention,
    feedforward,
    kv_cache,
    merge,
    norm,
    paged,
    position,
    quantize,
    sampling,
    varlen,
)
from . import sparse


def detect() -> str:
    """The version of PyTorch."""
    return str(torch.__version__)


def lacks() -> list[str]:
    """The instruction sets torch's own kernels do not use here: the CPU or `ATEN_CPU_CAPABILITY` has a lower level."""
    level = torch.backends.cpu.get_cpu_capability()
    avx512 = [] if level == "AVX512" else ["avx512f"]
    return avx512 if level in ("AVX2", "AVX512") else ["avx2", *avx512]


KERNELS: dict[str, Callable[..., Any]] = {
    "torch.sdpa.flash": attention.sdpa_flash,
    "torch.sdpa.flash.grouped": attention.sdpa_flash_grouped,
    "torch.sdpa.flash.cross": attention.sdpa_flash_cross,
    "torch.sdpa.math": attention.sdpa_math,
    "torch.sdpa.math.cross": attention.sdpa_math_cross,
    "torch.attention.unfused": attention.unfused,
    "torch.attention.unfused.cross": attention.unfused_cross,
    "torch.sdpa.flash.sinks": attention.sdpa_flash_sinks,
    "torch.lse.flash": attention.flash_lse,
    "torch.lse.unfused": attention.unfused_lse,
    "torch.lse.varlen.flash": varlen.flash_lse,
    "torch.lse.varlen.unfused": varlen.unfused_lse,
    "torch.lse.paged.flash": paged.flash_lse,
    "torch.lse.paged.unfused": paged.unfused_lse,
    "torch.merge_states": merge.merge_states,
    "torch.varlen.flash": varlen.flash,
    "torch.varlen.unfused": varlen.unfused,
    "torch.paged.flash.decode": paged.decode_flash,
    "torch.paged.flash.decode.gqa": paged.decode_flash,
    "torch.paged.flash.prefill": paged.prefill_flash,
    "torch.paged.flash.prefill.gqa": paged.prefill_flash,
    "torch.paged.unfused.decode": paged.decode_unfused,
    "torch.paged.unfused.decode.gqa": paged.decode_unfused,
    "torch.paged.unfused.prefill": paged.prefill_unfused,
    "torch.paged.unfused.prefill.gqa": paged.prefill_unfused,
    "torch.mla.prefill": paged.mla,
    "torch.mla.decode": paged.mla,
    "torch.mla.prefill.paged": paged.mla_paged_packed,
    "torch.mla.decode.paged": paged.mla_paged,
    "torch.sparse.block.gathered": sparse.block_gathered,
    "torch.sparse.block.masked": sparse.block_masked,
    "torch.sparse.variable_block.masked": sparse.variable_block_masked,
    "torch.embedding": position.embedding,
    "torch.embedding.wide_gradient": position.embedding_wide_gradient,
    "torch.rope": position.rope,
    "torch.rope.turned": position.rope_turned,
    "torch.alibi": position.alibi,
    "torch.alibi.unfolded": position.alibi_unfolded,
    "torch.rms_norm": norm.rms_norm,
    "torch.rms_norm.composed": norm.rms_norm_composed,
    "torch.rms_norm.blocked": norm.rms_norm_blocked,
    "torch.rms_norm.one_row": norm.rms_norm_one_row,
    "torch.layer_norm": norm.layer_norm,
    "torch.layer_norm.mixed": norm.layer_norm_mixed,
    "torch.layer_norm.wide_weight": norm.layer_norm,
    "torch.add_rms_norm": norm.fused_add_rms_norm,
    "torch.add_rms_norm.plain": norm.fused_add_rms_norm_plain,
    "torch.add_rms_norm.blocked": norm.fused_add_rms_norm_blocked,
    "torch.add_rms_norm.one_row": norm.fused_add_rms_norm_one_row,
    "torch.linear": feedforward.linear_kernel,
    "torch.linear_packed": feedforward.linear_packed,
    "torch.linear_packed.many_rows": feedforward.linear_packed,
    "torch.linear_packed.float16": feedforward.linear_packed,
    "torch.linear_quantized": feedforward.linear_quantized,
    "torch.mlp": feedforward.fused_mlp,
    "torch.mlp.wide": feedforward.fused_mlp_wide,
    "torch.mlp.blocked": feedforward.fused_mlp_blocked,
    "torch.mlp.two_parts": feedforward.fused_mlp_two_parts,
    "torch.silu_mul": feedforward.silu_mul,
    "torch.silu_mul.plain": feedforward.silu_mul_plain,
    "torch.gelu": feedforward.gelu_kernel,
    "torch.softmax": feedforward.softmax,
    "torch.gelu.sigmoid": feedforward.gelu_sigmoid,
    "torch.topk.literal": sampling.topk_literal,
    "torch.topk": sampling.topk,
    "torch.topk.grouped": sampling.topk_grouped,
    "torch.topp.literal": sampling.topp_literal,
    "torch.topp": sampling.topp,
    "torch.topp.sorted": sampling.topp_sorted,
    "torch.topp.binned": sampling.topp_binned,
    "torch.speculative": sampling.speculative,
    "torch.quantize": quantize.quantize,
    "torch.quantize.blocked": quantize.quantize_blocked,
    "torch.dequantize": quantize.dequantize,
    "torch.dequantize.blocked": quantize.dequantize_blocked,
    "torch.kv_append": kv_cache.append,
    "torch.kv_compact": kv_cache.compact,
}
