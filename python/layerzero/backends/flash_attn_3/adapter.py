"""FlashAttention 3 (`flash_attn_interface`), read from its sources at v2.8.3 (3.0.0b1) and at 0251105 of August 2026.

Run on an H200 at 0251105 (3.0.0): bfloat16 with heads of 128, without gradients. What else there is was tested against
functions of the same signatures.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .._shared.attention_lse import dense_lse, dense_sinks, varlen_lse
from .._shared.cuda_builds import check_build
from .._shared.dense_attention import Call, dense
from .._shared.library import Library
from .._shared.operands import is_tileable, tileable
from .._shared.packed_rows import Rows
from .._shared.paged_attention import Pages, decode, prefill
from .._shared.varlen_attention import Packed, varlen
from . import operator

_library = Library(
    "flash_attn_interface",
    *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    usual_version="3.0.0b1",
    advice="install FlashAttention 3",
)
# The functions for calls without gradients and for pages: the library's, or its operator itself.
_quick: Any = None
_cached: Any = None


def detect() -> str:
    """The version of FlashAttention 3; raises `ImportError` where it or a function is missing, `RuntimeError` for a
    wheel that was built for another CUDA."""
    global _quick, _cached
    version = _library.find()
    check_build("FlashAttention 3", version)
    _quick, _cached = _call, _library.flash_attn_with_kvcache
    if known := operator.find():
        _quick = _cached = operator.forward(known)
    return version


def _output(result: Any) -> Tensor:
    """The output out of what a build returns: that, or a tuple that begins with it."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _call(*args: Any, **keywords: Any) -> Tensor:
    return _output(_library.flash_attn_func(*args, **keywords))


def _options(call: Call) -> dict[str, Any]:
    return {"softmax_scale": call.scale, "causal": call.causal, "window_size": call.window, "softcap": call.softcap}


def _whole(call: Call) -> tuple[Any, ...] | None:
    """The library's own call, where no argument has to be turned or copied."""
    negative = call.scale is not None and call.scale <= 0.0
    if call.layout != "BSHD" or negative or not all(map(is_tileable, call.operands)):
        return None
    return _quick, call.operands, _options(call)


def _operand(tensor: Tensor, layout: str) -> Tensor:
    return tileable(tensor.transpose(1, 2) if layout == "BHSD" else tensor)


def _attend(call: Call) -> Tensor:
    output: Tensor = _quick(*call.operands, **_options(call))
    return output


def _trained(call: Call, **more: Any) -> Tensor:
    return _call(*call.operands, **_options(call), **more)


_OPTIONS = ("causal", "window_left", "window_right", "softcap")


def _paged(query: Tensor, pages: Pages, **more: Any) -> Tensor:
    output = _cached(
        query,
        pages.key_cache,
        pages.value_cache,
        cache_seqlens=pages.context_lens,
        page_table=pages.block_tables,
        softmax_scale=pages.scale,
        # A single query is the last position: nothing lies behind it.
        window_size=(pages.window_left, -1),
        softcap=pages.softcap,
        **more,
    )
    return _output(output)


def _prefill(query: Tensor, pages: Pages, rows: Rows, cu_seqlens_q: Tensor, causal: bool) -> Tensor:
    return _paged(query, pages, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max(rows.longest, 1), causal=causal)


def _attend_lse(call: Call) -> tuple[Tensor, Tensor]:
    output, lse, *_ = _library.flash_attn_func(*call.operands, **_options(call), return_attn_probs=True)
    return output, lse


def _varlen(call: Packed) -> Tensor:
    return _output(_packed(call, False))


def _varlen_lse(call: Packed) -> tuple[Tensor, Tensor]:
    output, lse, *_ = _packed(call, True)
    return output, lse


def _packed(call: Packed, with_lse: bool) -> Any:
    return _library.flash_attn_varlen_func(
        call.query,
        call.key,
        call.value,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.rows.longest,
        max_seqlen_k=call.tokens.longest,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=call.window,
        softcap=call.softcap,
        return_attn_probs=with_lse,
    )


paged_decode, paged_prefill = decode(_paged, tileable), prefill(_prefill, tileable)

KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.v3": dense(_attend, *_OPTIONS, operand=_operand, whole=_whole),
    # Its backward adds in any order, or in a fixed one.
    "flash_attn.v3.train": dense(_trained, *_OPTIONS, operand=_operand),
    "flash_attn.v3.train.deterministic": dense(partial(_trained, deterministic=True), *_OPTIONS, operand=_operand),
    "flash_attn.v3.cross": dense(_attend, "softcap", operand=_operand, whole=_whole),
    "flash_attn.v3.cross.train": dense(_trained, "softcap", operand=_operand),
    "flash_attn.v3.sinks": dense_sinks(_attend_lse, _operand),
    "flash_attn.v3.lse": dense_lse(_attend_lse, _operand),
    "flash_attn.v3.lse.varlen": varlen_lse(_varlen_lse, tileable),
    "flash_attn.v3.varlen": varlen(_varlen, tileable),
    "flash_attn.v3.paged.decode": paged_decode,
    "flash_attn.v3.paged.decode.gqa": paged_decode,
    "flash_attn.v3.paged.prefill": paged_prefill,
    "flash_attn.v3.paged.prefill.gqa": paged_prefill,
}
