"""FlashAttention 4 (`flash_attn.cute`): dense attention and packed queries over pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..attention_lse import dense_lse, dense_sinks, varlen_lse
from ..dense_attention import Call, dense
from ..library import Library
from ..operands import bshd, readable
from ..packed_rows import Rows
from ..paged_attention import Pages, prefill
from ..varlen_attention import Packed, varlen
from .launching import launch

library = Library("flash_attn.cute", "flash_attn_func", "flash_attn_varlen_func")


def _side(window: int) -> int | None:
    return None if window < 0 else window


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def operand(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in the library's order, and a copy of one that is expanded."""
    turned = bshd(tensor, layout)
    return turned.contiguous() if _is_expanded(turned) else turned


def single_launch(
    function: Callable[..., Any], operands: tuple[Tensor, ...], layout: str, **keywords: Any
) -> tuple[Any, ...] | None:
    """The whole call as one launch, where no argument has to be copied."""
    scale = keywords["softmax_scale"]
    if (scale is not None and scale <= 0.0) or not all(readable(t) and not _is_expanded(t) for t in operands):
        return None
    return launch(function, operands, layout == "BHSD", **keywords), operands


def _options(call: Call) -> dict[str, Any]:
    return {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": (_side(call.window_left), _side(call.window_right)),
        "softcap": call.softcap,
    }


def _whole(call: Call, **more: Any) -> tuple[Any, ...] | None:
    return single_launch(library.flash_attn_func, call.operands, call.layout, **_options(call), **more)


def _attend(call: Call, **more: Any) -> Tensor:
    output: Tensor = library.flash_attn_func(*call.operands, **_options(call), **more)[0]
    return output


_OPTIONS = ("causal", "window_left", "window_right", "softcap")
attention = dense(_attend, *_OPTIONS, operand=operand, whole=_whole)
# Each head by itself: the library would work on the heads of a group together.
unpacked = dense(partial(_attend, pack_gqa=False), *_OPTIONS, operand=operand, whole=partial(_whole, pack_gqa=False))
cross = dense(_attend, "softcap", operand=operand, whole=_whole)
# With gradients.
trained = dense(_attend, *_OPTIONS, operand=operand)
trained_cross = dense(_attend, "softcap", operand=operand)


def _prefill(query: Tensor, pages: Pages, rows: Rows, cu_seqlens_q: Tensor, causal: bool) -> Tensor:
    output: Tensor = library.flash_attn_varlen_func(
        query,
        pages.key_cache,
        pages.value_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max(rows.longest, 1),
        max_seqlen_k=pages.slots,
        seqused_k=pages.context_lens,
        page_table=pages.block_tables,
        softmax_scale=pages.scale,
        causal=causal,
        window_size=(_side(pages.window_left), None),
        softcap=pages.softcap,
    )[0]
    return output


def _attend_lse(call: Call) -> tuple[Tensor, Tensor]:
    output, lse = library.flash_attn_func(*call.operands, **_options(call), return_lse=True)
    return output, lse


def _varlen(call: Packed) -> Tensor:
    output: Tensor = _packed(call)[0]
    return output


def _varlen_lse(call: Packed) -> tuple[Tensor, Tensor]:
    output, lse = _packed(call, return_lse=True)
    return output, lse


def _packed(call: Packed, **more: Any) -> Any:
    return library.flash_attn_varlen_func(
        call.query,
        call.key,
        call.value,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.rows.longest,
        max_seqlen_k=call.tokens.longest,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=(_side(call.window[0]), _side(call.window[1])),
        softcap=call.softcap,
        **more,
    )


paged_prefill = prefill(_prefill)
packed = varlen(_varlen)
attention_lse, packed_lse = dense_lse(_attend_lse, operand), varlen_lse(_varlen_lse)
sinks = dense_sinks(_attend_lse, operand)
