"""xFormers' `memory_efficient_attention`, read from its sources at v0.0.33 to v0.0.35.

Its operators were not run on hardware, and are tested against functions of the same signatures; a wheel built for another
CUDA was seen to be refused with that reason.

Its operators are named in each call, so that what a kernel is declared to take is what its operator takes: "flash" for
narrow floats on Ampere and newer, "cutlass" for all floats and masks, up to Hopper.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..._shared.library import Library
from ..._shared.operands import bshd, loadable, positive
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


def _bias(causal: bool, window_left: int, window_right: int, seq_q: int, seq_k: int) -> Any:
    """What the library calls the keys a query reaches by position; all of these are aligned bottom-right."""
    if causal:
        if window_left < 0:
            return _library.attn_bias.LowerTriangularFromBottomRightMask()
        # Its window counts the query's own position.
        return _library.attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(window_left + 1)
    if window_left < 0 and window_right < 0:
        return None
    left, right = (window_left if window_left >= 0 else seq_k), (window_right if window_right >= 0 else seq_q)
    return _library.attn_bias.LocalAttentionFromBottomRightMask(left, right)


def _additive(attn_mask: Tensor, query: Tensor, layout: str, seq_k: int) -> Tensor:
    """A mask as a bias of the query's dtype. The library does not broadcast: the bias is expanded to batch, heads,
    queries and keys, which copies nothing."""
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~attn_mask, -math.inf
        )
    batch, heads, seq_q = query.shape[0], *(query.shape[1:3] if layout == "BHSD" else query.shape[2:0:-1])
    return loadable(attn_mask).expand(batch, heads, seq_q, seq_k)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    dropout_p: float,
    scale: float | None,
    seed: int,
    layout: str,
    operators: Any,
) -> Tensor:
    query, scale = positive(query, scale)
    q, k, v = bshd(query, layout), bshd(key, layout), bshd(value, layout)
    shape = (*q.shape[:3], v.shape[3])
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads:
        # Groups of query heads, each with the one key/value head it shares.
        group = heads // kv_heads
        q = q.view(*q.shape[:2], kv_heads, group, q.shape[3])
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
    output: Tensor
    if dropout_p > 0.0:
        with seeded(q.device, seed):
            output = _library.memory_efficient_attention(q, k, v, bias, dropout_p, scale, op=operators)
    else:
        output = _library.memory_efficient_attention(q, k, v, bias, 0.0, scale, op=operators)
    output = output.reshape(shape)
    return output.transpose(1, 2) if layout == "BHSD" else output


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Dense attention by its flash operator."""
    sequence = 2 if layout == "BHSD" else 1
    bias = _bias(causal, window_left, window_right, query.shape[sequence], key.shape[sequence])
    return _run(query, key, value, bias, dropout_p, scale, seed, layout, _flash)


def flash_cross(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout_p: float, seed: int, layout: str
) -> Tensor:
    """Attention to another sequence by its flash operator."""
    return _run(query, key, value, None, dropout_p, scale, seed, layout, _flash)


def cutlass(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Dense attention by its CUTLASS operator."""
    if attn_mask is not None:
        return _masked(query, key, value, attn_mask, dropout_p, scale, seed, layout)
    return _run(query, key, value, _bias(causal, window_left, -1, 0, 0), dropout_p, scale, seed, layout, _cutlass)


def cutlass_train(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Dense attention by its CUTLASS operator, with a backward."""
    return _run(query, key, value, _bias(causal, -1, -1, 0, 0), dropout_p, scale, seed, layout, _cutlass)


def cutlass_cross(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Attention to another sequence by its CUTLASS operator."""
    if attn_mask is not None:
        return _masked(query, key, value, attn_mask, dropout_p, scale, seed, layout)
    return _run(query, key, value, None, dropout_p, scale, seed, layout, _cutlass)


def cutlass_cross_train(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout_p: float, seed: int, layout: str
) -> Tensor:
    """Attention to another sequence by its CUTLASS operator, with a backward."""
    return _run(query, key, value, None, dropout_p, scale, seed, layout, _cutlass)


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    scale: float | None,
    seed: int,
    layout: str,
) -> Tensor:
    bias = _additive(attn_mask, query, layout, key.shape[2 if layout == "BHSD" else 1])
    output = _run(query, key, value, bias, dropout_p, scale, seed, layout, _cutlass)
    # A query that may attend to nothing gives zeros; the operator divides by the sum of its weights.
    nothing = (bias == -math.inf).all(-1, keepdim=True)
    return output.masked_fill(nothing if layout == "BHSD" else nothing.transpose(1, 2), 0.0)


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
