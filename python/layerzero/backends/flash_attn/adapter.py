"""FlashAttention 2 (`flash_attn`), read from its sources at v2.8.0 to v2.8.3.post1.

Run on an H200 at 2.8.3.post2: heads of 128 in bfloat16 and float16, of 64 in bfloat16, without gradients. What else there is was tested
against functions of the same signatures.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._shared.attention_lse import dense_lse, dense_sinks, varlen_lse
from .._shared.cuda_builds import check_build
from .._shared.dense_attention import Call, dense
from .._shared.library import Library
from .._shared.packed_rows import Rows
from .._shared.paged_attention import Pages, decode, prefill
from .._shared.seeded_dropout import seeded
from .._shared.varlen_attention import Packed, varlen

_library = Library(
    "flash_attn",
    *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    # flash-attn 4 puts its modules into a package of the same name.
    advice="install flash-attn 2.8",
)


def detect() -> str:
    """The version of flash-attn; raises `ImportError` where it or a function is missing, `RuntimeError` for a wheel
    that was built for another CUDA."""
    version = _library.find()
    check_build("flash-attn", version)
    return version


def _wants_slopes(call: Call) -> bool:
    slopes = call.alibi_slopes
    return slopes is not None and slopes.requires_grad and torch.is_grad_enabled()


def _whole(call: Call) -> tuple[Any, ...] | None:
    """The library's own call, where no argument has to be turned or copied and nothing is drawn."""
    if call.dropout_p > 0.0 or not call.is_plain() or _wants_slopes(call):
        return None
    options = (0.0, call.scale, call.causal, call.window, call.softcap, call.alibi_slopes)
    return _library.flash_attn_func, (*call.operands, *options)


def _attend(call: Call, deterministic: bool = False) -> Tensor:
    if _wants_slopes(call):
        raise RuntimeError("flash-attn gives no gradient for alibi_slopes")
    options = (call.dropout_p, call.scale, call.causal, call.window, call.softcap, call.alibi_slopes, deterministic)
    with seeded(call.query.device, call.seed) if call.dropout_p > 0.0 else nullcontext():
        output: Tensor = _library.flash_attn_func(*call.operands, *options)
    return output


_OPTIONS = ("alibi_slopes", "causal", "window_left", "window_right", "softcap", "dropout_p", "seed")
_CROSS = ("softcap", "dropout_p", "seed")
# Its backward adds in any order; in a fixed one, it needs more time and memory.
_in_order = partial(_attend, deterministic=True)
attention = dense(_attend, *_OPTIONS, whole=_whole)
cross = dense(_attend, *_CROSS, whole=_whole)


def _decode(query: Tensor, pages: Pages) -> Tensor:
    output: Tensor = _library.flash_attn_with_kvcache(
        query,
        pages.key_cache,
        pages.value_cache,
        cache_seqlens=pages.context_lens,
        block_table=pages.block_tables,
        softmax_scale=pages.scale,
        # A single query is the last position: nothing lies behind it.
        window_size=(pages.window_left, -1),
        softcap=pages.softcap,
    )
    return output


def _prefill(query: Tensor, pages: Pages, rows: Rows, cu_seqlens_q: Tensor, causal: bool) -> Tensor:
    # Told that no sequence has two queries, it takes for granted that each has one.
    each_has_one = rows.first == 0 and rows.end == query.shape[0] == pages.context_lens.shape[0]
    longest = rows.longest if each_has_one else max(rows.longest, 2)
    output: Tensor = _library.flash_attn_varlen_func(
        query,
        pages.key_cache,
        pages.value_cache,
        cu_seqlens_q,
        torch.nn.functional.pad(pages.context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        longest,
        pages.slots,
        softmax_scale=pages.scale,
        causal=causal,
        window_size=(pages.window_left, -1),
        softcap=pages.softcap,
        block_table=pages.block_tables,
    )
    return output


def _attend_lse(call: Call) -> tuple[Tensor, Tensor]:
    options = (0.0, call.scale, call.causal, call.window, call.softcap, None, False, True)
    output, lse, _ = _library.flash_attn_func(*call.operands, *options)
    return output, lse


def _varlen(call: Packed) -> Tensor:
    output: Tensor = _packed(call, False)
    return output


def _varlen_lse(call: Packed) -> tuple[Tensor, Tensor]:
    output, lse, _ = _packed(call, True)
    return output, lse


def _packed(call: Packed, with_lse: bool) -> Any:
    # Told that no sequence has two queries, it takes for granted that each has one.
    longest = call.rows.longest if call.each_has_one else max(call.rows.longest, 2)
    return _library.flash_attn_varlen_func(
        call.query,
        call.key,
        call.value,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        longest,
        call.tokens.longest,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=call.window,
        softcap=call.softcap,
        return_attn_probs=with_lse,
    )


paged_decode, paged_prefill = decode(_decode), prefill(_prefill)

KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.v2": attention,
    "flash_attn.v2.train": attention,
    "flash_attn.v2.train.deterministic": dense(_in_order, *_OPTIONS),
    "flash_attn.v2.cross": cross,
    "flash_attn.v2.cross.train": cross,
    "flash_attn.v2.cross.train.deterministic": dense(_in_order, *_CROSS),
    "flash_attn.v2.sinks": dense_sinks(_attend_lse),
    "flash_attn.v2.lse": dense_lse(_attend_lse),
    "flash_attn.v2.lse.varlen": varlen_lse(_varlen_lse),
    "flash_attn.v2.varlen": varlen(_varlen),
    "flash_attn.v2.paged.decode": paged_decode,
    "flash_attn.v2.paged.decode.gqa": paged_decode,
    "flash_attn.v2.paged.prefill": paged_prefill,
    "flash_attn.v2.paged.prefill.gqa": paged_prefill,
}
