"""PyTorch's own kernels for NVIDIA GPUs, and compositions of them.

Run on an H200 with torch 2.11.0 and CUDA 13.0: every kernel against float64, and captured in graphs.
"""

from collections.abc import Callable
from typing import Any

import torch

from .._shared.torch_device_functions import caches, fourbit, mla, paged, rows, sampling, sdpa, sparse, unfused, varlen
from .._shared.torch_functions import attention, feedforward, merge, norm, position
from .._shared.torch_functions.sampling import topk_literal, topp_literal
from . import eightbit


def detect() -> str:
    """The version of PyTorch; raises `RuntimeError` where it was built without CUDA or finds no device."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
    return str(torch.__version__)


KERNELS: dict[str, Callable[..., Any]] = {
    "torch.cuda.sdpa": sdpa.sdpa,
    "torch.cuda.sdpa.train": sdpa.sdpa,
    "torch.cuda.sdpa.cross": sdpa.sdpa_cross,
    "torch.cuda.sdpa.cross.train": sdpa.sdpa_cross,
    "torch.cuda.sdpa.literal": sdpa.literal,
    "torch.cuda.sdpa.literal.train": sdpa.literal,
    "torch.cuda.sdpa.masked": sdpa.masked,
    "torch.cuda.sdpa.masked.train": sdpa.masked,
    "torch.cuda.sdpa.masked.cross": sdpa.masked_cross,
    "torch.cuda.sdpa.masked.cross.train": sdpa.masked_cross,
    "torch.cuda.sdpa.grouped": sdpa.grouped,
    "torch.cuda.sdpa.flash": sdpa.flash,
    "torch.cuda.sdpa.flash.train": sdpa.flash,
    "torch.cuda.sdpa.flash.cross": sdpa.flash_cross,
    "torch.cuda.sdpa.flash.cross.train": sdpa.flash_cross,
    "torch.cuda.sdpa.cudnn": sdpa.cudnn,
    "torch.cuda.sdpa.cudnn.train": sdpa.cudnn,
    "torch.cuda.sdpa.cudnn.cross": sdpa.cudnn_cross,
    "torch.cuda.sdpa.cudnn.cross.train": sdpa.cudnn_cross,
    "torch.cuda.sdpa.efficient": sdpa.efficient,
    "torch.cuda.sdpa.efficient.train": sdpa.efficient,
    "torch.cuda.sdpa.efficient.cross": sdpa.efficient_cross,
    "torch.cuda.sdpa.efficient.cross.train": sdpa.efficient_cross,
    "torch.cuda.sdpa.math": attention.sdpa_math,
    "torch.cuda.sdpa.math.cross": attention.sdpa_math_cross,
    "torch.cuda.attention.unfused": unfused.unfused,
    "torch.cuda.attention.unfused.cross": unfused.unfused_cross,
    "torch.cuda.sdpa.flash.sinks": sdpa.flash_sinks,
    "torch.cuda.lse.flash": sdpa.flash_lse,
    "torch.cuda.lse.unfused": unfused.unfused_lse,
    "torch.cuda.lse.varlen.flash": varlen.flash_lse,
    "torch.cuda.lse.varlen.unfused": varlen.unfused_lse,
    "torch.cuda.lse.paged.flash": paged.flash_lse,
    "torch.cuda.lse.paged.unfused": paged.unfused_lse,
    "torch.cuda.merge_states": merge.merge_states,
    "torch.cuda.varlen.flash": varlen.flash,
    "torch.cuda.varlen.sdpa": varlen.by_sdpa,
    "torch.cuda.varlen.unfused": varlen.unfused,
    "torch.cuda.paged.sdpa.decode": paged.decode_sdpa,
    "torch.cuda.paged.sdpa.decode.gqa": paged.decode_sdpa,
    "torch.cuda.paged.flash.decode": paged.decode_flash,
    "torch.cuda.paged.flash.decode.gqa": paged.decode_flash,
    "torch.cuda.paged.unfused.decode": paged.decode_unfused,
    "torch.cuda.paged.unfused.decode.gqa": paged.decode_unfused,
    "torch.cuda.paged.flash.prefill": paged.prefill_flash,
    "torch.cuda.paged.flash.prefill.gqa": paged.prefill_flash,
    "torch.cuda.paged.unfused.prefill": paged.prefill_unfused,
    "torch.cuda.paged.unfused.prefill.gqa": paged.prefill_unfused,
    "torch.cuda.mla.prefill": mla.mla,
    "torch.cuda.mla.decode": mla.mla,
    "torch.cuda.mla.prefill.paged": mla.mla_paged_packed,
    "torch.cuda.mla.decode.paged": mla.mla_paged,
    "torch.cuda.sparse.block": sparse.block,
    "torch.cuda.sparse.variable_block": sparse.variable_block,
    "torch.cuda.embedding": rows.embedding,
    "torch.cuda.rope": rows.rope,
    "torch.cuda.rope.complex": rows.rope_complex,
    "torch.cuda.alibi": position.alibi,
    "torch.cuda.alibi.unfolded": position.alibi_unfolded,
    "torch.cuda.rms_norm": norm.rms_norm,
    "torch.cuda.rms_norm.composed": norm.rms_norm_composed,
    "torch.cuda.layer_norm": norm.layer_norm,
    "torch.cuda.layer_norm.mixed": norm.layer_norm_mixed,
    "torch.cuda.add_rms_norm": norm.fused_add_rms_norm_plain,
    "torch.cuda.add_rms_norm.composed": norm.fused_add_rms_norm,
    "torch.cuda.linear": feedforward.linear_kernel,
    "torch.cuda.linear_quantized": feedforward.linear_quantized,
    "torch.cuda.mlp": feedforward.fused_mlp,
    "torch.cuda.silu_mul": feedforward.silu_mul_plain,
    "torch.cuda.silu_mul.reused": feedforward.silu_mul,
    "torch.cuda.gelu": feedforward.gelu_kernel,
    "torch.cuda.softmax": feedforward.softmax,
    "torch.cuda.topk.literal": topk_literal,
    "torch.cuda.topp.literal": topp_literal,
    "torch.cuda.topk": sampling.topk,
    "torch.cuda.topk.sorted": sampling.topk_sorted,
    "torch.cuda.topp": sampling.topp_sorted,
    "torch.cuda.speculative": sampling.speculative,
    "torch.cuda.quantize": eightbit.quantize,
    "torch.cuda.quantize.packed": fourbit.quantize,
    "torch.cuda.dequantize": eightbit.dequantize,
    "torch.cuda.dequantize.int4": fourbit.dequantize_int4,
    "torch.cuda.dequantize.mxfp4": fourbit.dequantize_mxfp4,
    "torch.cuda.dequantize.nvfp4": fourbit.dequantize_nvfp4,
    "torch.cuda.kv_append": caches.append,
    "torch.cuda.kv_compact": caches.compact,
}
