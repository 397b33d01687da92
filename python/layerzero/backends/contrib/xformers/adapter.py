"""xFormers' `memory_efficient_attention`, read from its sources at v0.0.33 to v0.0.35.

Its operators were not run on hardware, and are tested against functions of the same signatures; a wheel built for another
CUDA was seen to be refused with that reason.

Its operators are named in each call, so that what a kernel is declared to take is what its operator takes: "flash" for
narrow floats on Ampere and newer, "cutlass" for all floats and masks, up to Hopper.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..._shared.dense_attention import Call, dense
from ..._shared.library import Library
from ..._shared.operands import loadable
from ..._shared.seeded_dropout import seeded

_library = Library(
    "xformers",
    modules={
        "xformers": (),
        "xformers.ops.fmha": ("memory_efficient_attention", "attn_bias", "flash", "cutlass"),
        "xformers._cpp_lib": (),
    },
    own_version=True,
)
# Its operators, forward and backward, once it is found.
_flash: Any = None
_cutlass: Any = None


def detect() -> str:
    """The version of xFormers; raises `ImportError` where it cannot be imported, `RuntimeError` where it has no
    operators: a wheel built for another torch is imported with a warning, and has none."""
    global _flash, _cutlass
    version = _library.find()
    problem = getattr(import_module("xformers._cpp_lib"), "_cpp_library_load_exception", None)
    if problem is not None:
        raise RuntimeError(f"xformers {version} has no operators here: {' '.join(str(problem).split())}")
    flash, cutlass = ((kind.FwOp, kind.BwOp) for kind in (_library.flash, _library.cutlass))
    missing = [str(operator.NAME) for operator in (*flash, *cutlass) if not operator.is_available()]
    if missing:
        raise RuntimeError(f"xformers {version} has no operators {', '.join(missing)} with torch {torch.__version__}")
    _flash, _cutlass = flash, cutlass
    return version


def _bias(call: Call) -> Any:
    """What the library calls the keys a query reaches by position; all of these are aligned bottom-right."""
    left, right = call.window
    if call.causal:
        if left < 0:
            return _library.attn_bias.LowerTriangularFromBottomRightMask()
        # Its window counts the query's own position.
        return _library.attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(left + 1)
    if left < 0 and right < 0:
        return None
    left, right = (left if left >= 0 else call.key.shape[1]), (right if right >= 0 else call.query.shape[1])
    return _library.attn_bias.LocalAttentionFromBottomRightMask(left, right)


def _additive(attn_mask: Tensor, query: Tensor, seq_k: int) -> Tensor:
    """A mask as a bias of the query's dtype. The library does not broadcast: the bias is expanded to batch, heads,
    queries and keys, which copies nothing."""
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~attn_mask, -math.inf
        )
    batch, seq_q, heads, _ = query.shape
    return loadable(attn_mask).expand(batch, heads, seq_q, seq_k)


def _run(call: Call, bias: Any, operators: Any) -> Tensor:
    q, k, v = call.operands
    shape = (*q.shape[:3], v.shape[3])
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads:
        # Groups of query heads, each with the one key/value head it shares.
        group = heads // kv_heads
        q = q.view(*q.shape[:2], kv_heads, group, q.shape[3])
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
    with seeded(q.device, call.seed) if call.dropout_p > 0.0 else nullcontext():
        output: Tensor = _library.memory_efficient_attention(q, k, v, bias, call.dropout_p, call.scale, op=operators)
    return output.reshape(shape)


def _by_flash(call: Call) -> Tensor:
    return _run(call, _bias(call), _flash)


def _by_cutlass(call: Call) -> Tensor:
    if call.attn_mask is None:
        return _run(call, _bias(call), _cutlass)
    bias = _additive(call.attn_mask, call.query, call.key.shape[1])
    output = _run(call, bias, _cutlass)
    # A query that may attend to nothing gives zeros; the operator divides by the sum of its weights.
    nothing = (bias == -math.inf).all(-1, keepdim=True)
    return output.masked_fill(nothing.transpose(1, 2), 0.0)


_DROPOUT = ("dropout_p", "seed")
flash = dense(_by_flash, "causal", "window_left", "window_right", *_DROPOUT)
flash_cross = dense(_by_flash, *_DROPOUT)
cutlass = dense(_by_cutlass, "attn_mask", "causal", "window_left", *_DROPOUT)
cutlass_train = dense(_by_cutlass, "causal", *_DROPOUT)
cutlass_cross = dense(_by_cutlass, "attn_mask", *_DROPOUT)
cutlass_cross_train = dense(_by_cutlass, *_DROPOUT)

KERNELS: dict[str, Callable[..., Any]] = {
    "xformers.flash": flash,
    "xformers.flash.train": flash,
    "xformers.flash.cross": flash_cross,
    "xformers.flash.cross.train": flash_cross,
    "xformers.cutlass": cutlass,
    "xformers.cutlass.train": cutlass_train,
    "xformers.cutlass.cross": cutlass_cross,
    "xformers.cutlass.cross.train": cutlass_cross_train,
}
