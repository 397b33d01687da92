"""PyTorch on any device it has: AMD, Intel, Gaudi and Apple GPUs, and those of other vendors (`privateuse1`).

Only what is composed of ordinary torch functions, which every backend of torch is to have: nothing is claimed of the
device. The functions are those of the CUDA backend, tried here on CPU tensors. Not run on hardware.
"""

from collections.abc import Callable
from typing import Any

import torch

from .._shared.torch_device_functions import caches, fourbit, mla, paged, rows, sampling, sdpa, sparse, unfused, varlen
from .._shared.torch_functions import attention, feedforward, merge, norm, position, quantize
from .host import wide


def detect() -> str:
    """The version of PyTorch."""
    return str(torch.__version__)


KERNELS: dict[str, Callable[..., Any]] = {
    "torch.any.sdpa": sdpa.sdpa,
    "torch.any.sdpa.train": sdpa.sdpa,
    "torch.any.sdpa.cross": sdpa.sdpa_cross,
    "torch.any.sdpa.cross.train": sdpa.sdpa_cross,
    "torch.any.sdpa.literal": sdpa.literal,
    "torch.any.sdpa.literal.train": sdpa.literal,
    "torch.any.sdpa.masked": sdpa.masked,
    "torch.any.sdpa.masked.train": sdpa.masked,
    "torch.any.sdpa.masked.cross": sdpa.masked_cross,
    "torch.any.sdpa.masked.cross.train": sdpa.masked_cross,
    "torch.any.sdpa.math": attention.sdpa_math,
    "torch.any.sdpa.math.cross": attention.sdpa_math_cross,
    "torch.any.attention.unfused": unfused.unfused,
    "torch.any.attention.unfused.cross": unfused.unfused_cross,
    "torch.any.lse.unfused": unfused.unfused_lse,
    "torch.any.lse.varlen.unfused": varlen.unfused_lse,
    "torch.any.lse.paged.unfused": paged.unfused_lse,
    "torch.any.merge_states": merge.merge_states,
    "torch.any.varlen.sdpa": varlen.by_sdpa,
    "torch.any.varlen.unfused": varlen.unfused,
    "torch.any.paged.sdpa.decode": paged.decode_sdpa,
    "torch.any.paged.sdpa.decode.gqa": paged.decode_sdpa,
    "torch.any.paged.unfused.decode": paged.decode_unfused,
    "torch.any.paged.unfused.decode.gqa": paged.decode_unfused,
    "torch.any.paged.unfused.prefill": paged.prefill_unfused,
    "torch.any.paged.unfused.prefill.gqa": paged.prefill_unfused,
    "torch.any.mla.prefill": mla.mla,
    "torch.any.mla.decode": mla.mla,
    "torch.any.mla.prefill.paged": mla.mla_paged_packed,
    "torch.any.mla.decode.paged": mla.mla_paged,
    "torch.any.sparse.block": sparse.block,
    "torch.any.sparse.variable_block": sparse.variable_block,
    "torch.any.embedding": rows.embedding,
    "torch.any.rope": position.rope,
    "torch.any.alibi": position.alibi,
    "torch.any.rms_norm": wide(norm.rms_norm),
    "torch.any.rms_norm.composed": wide(norm.rms_norm_composed),
    "torch.any.layer_norm": wide(norm.layer_norm),
    "torch.any.layer_norm.mixed": wide(norm.layer_norm_mixed),
    "torch.any.add_rms_norm": wide(norm.fused_add_rms_norm_plain),
    "torch.any.add_rms_norm.composed": wide(norm.fused_add_rms_norm),
    "torch.any.linear": feedforward.linear_kernel,
    "torch.any.linear_quantized": feedforward.linear_quantized,
    "torch.any.mlp": feedforward.fused_mlp,
    "torch.any.silu_mul": feedforward.silu_mul_plain,
    "torch.any.gelu": feedforward.gelu_kernel,
    "torch.any.softmax": feedforward.softmax,
    "torch.any.topk": wide(sampling.topk),
    "torch.any.topk.sorted": wide(sampling.topk_sorted),
    "torch.any.topp": wide(sampling.topp_sorted),
    "torch.any.speculative": wide(sampling.speculative),
    "torch.any.quantize": wide(quantize.quantize),
    "torch.any.quantize.packed": wide(fourbit.quantize),
    "torch.any.dequantize": wide(quantize.dequantize),
    "torch.any.dequantize.int4": wide(fourbit.dequantize_int4),
    "torch.any.dequantize.mxfp4": wide(fourbit.dequantize_mxfp4),
    "torch.any.dequantize.nvfp4": wide(fourbit.dequantize_nvfp4),
    "torch.any.kv_append": caches.append,
    "torch.any.kv_compact": caches.compact,
}
