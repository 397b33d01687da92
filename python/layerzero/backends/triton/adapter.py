"""Kernels of our own in Triton (`triton`), written for version 3.6.

Run on an H200 with Triton 3.6.0: every kernel against float64, and captured in graphs. Tests on other machines use
Triton's interpreter.

Importing Triton and these kernels takes the better part of a second. So nothing here does until a kernel runs or is
compiled: the adapter knows where each kernel is and which arguments it has.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

from layerzero.kernels import draws

from .._shared.library import Library
from . import check

_QUANTIZE = ("input", "scale", "dtype", "granularity", "group_size", "zero_point")
_DEQUANTIZE = ("values", "scales", "zero_points", "dtype", "granularity", "group_size")
_CROSS = ("query", "key", "value", "attn_mask", "scale", "softcap", "layout")
_ATTENTION = (
    *("query", "key", "value", "attn_mask", "causal", "scale", "window_left", "window_right", "softcap", "layout"),
)
_DECODE = ("query", "key", "value", "scale", "window_left", "softcap", "layout")
_MASKED = ("query", "key", "value", "attn_mask", "scale", "window_left", "softcap", "layout")
_PAGED = (
    *("query", "key_cache", "value_cache", "block_tables", "context_lens", "scale", "window_left", "softcap"),
    "layout",
)
_PREFILL = (
    *("query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q", "causal", "scale"),
    *("window_left", "softcap", "layout"),
)
_MLA = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "block_tables", "context_lens", "scale")
#: By kernel: the module that has it in its own `KERNELS`, and its arguments.
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "triton.rms_norm": ("norm", ("input", "weight", "eps")),
    "triton.add_rms_norm": ("norm", ("input", "residual", "weight", "eps")),
    "triton.layer_norm": ("norm", ("input", "weight", "bias", "eps")),
    "triton.silu_mul": ("activation", ("gate", "up")),
    "triton.gelu": ("activation", ("input", "approximate")),
    "triton.rope": ("position", ("input", "cos", "sin", "positions", "interleaved", "layout")),
    "triton.alibi": ("position", ("slopes", "seq_q", "seq_k")),
    "triton.kv_append": ("caching", ("key", "value", "key_cache", "value_cache", "slot_mapping", "layout")),
    "triton.topp": ("sampling.sampling", ("logits", "uniform", "p", "seed")),
    "triton.topk": ("sampling.sampling", ("logits", "uniform", "k", "seed")),
    "triton.speculative": (
        "sampling.verifying",
        ("draft_ids", "draft_probs", "target_probs", "uniform", "seed"),
    ),
    **dict.fromkeys(
        (f"triton.attention{kind}" for kind in ("", ".gqa", ".masked", ".masked.gqa")), ("attention", _ATTENTION)
    ),
    **dict.fromkeys(("triton.attention.cross", "triton.attention.masked.cross"), ("attention", _CROSS)),
    **dict.fromkeys(("triton.decode", "triton.decode.gqa"), ("decoding.decode", _DECODE)),
    **dict.fromkeys(("triton.decode.masked", "triton.decode.masked.gqa"), ("decoding.masked", _MASKED)),
    **dict.fromkeys(("triton.paged.decode", "triton.paged.decode.gqa"), ("decoding.paged", _PAGED)),
    **dict.fromkeys(("triton.paged.prefill", "triton.paged.prefill.gqa"), ("prefilling", _PREFILL)),
    "triton.mla.decode.paged": ("decoding.mla", _MLA),
    "triton.merge_states": ("merging", ("out_a", "lse_a", "out_b", "lse_b")),
    **dict.fromkeys(("triton.quantize", "triton.quantize.packed"), ("quantization.quantize", _QUANTIZE)),
    **dict.fromkeys(
        ("triton.dequantize", *(f"triton.dequantize.{form}" for form in ("int4", "mxfp4", "nvfp4"))),
        ("quantization.dequantize", _DEQUANTIZE),
    ),
}


#: Kernels that torch's compiler can make part of a graph. The others are calls that it would rather fuse, or that it keeps as
#: operators.
TRACED = frozenset(kernel for kernel, (module, _) in PLACES.items() if module in ("attention", "decoding.decode"))


def detect() -> str:
    """The version of Triton, which is imported; raises `RuntimeError` where there is no device it compiles for."""
    check()
    return Library("triton", own_version=True).find()


def _imported_later(kernel: str, module: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """A kernel whose module is imported at its first call."""

    @cache
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = import_module(f"{__package__}.{module}").KERNELS[kernel]
        return found

    def run(*given: Any, **named: Any) -> Any:
        return function()(*given, **named)

    def direct(*given: Any, **named: Any) -> Any:
        plan = getattr(function(), "direct", None)
        return plan(*given, **named) if plan else None

    def traced(*given: Any, **named: Any) -> Any:
        found = function()
        with import_module(f"{__package__}.launching").traced():
            return found(*given, **named)

    run.direct = direct  # type: ignore[attr-defined]
    if kernel in TRACED:
        run.traced = traced  # type: ignore[attr-defined]
    run.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in arguments])  # type: ignore[attr-defined]
    run.__name__ = run.__qualname__ = kernel
    # The kernels that draw do so from torch's generator where no seed is given.
    return draws(run) if "seed" in arguments else run


KERNELS: dict[str, Callable[..., Any]] = {
    kernel: _imported_later(kernel, module, arguments) for kernel, (module, arguments) in PLACES.items()
}
