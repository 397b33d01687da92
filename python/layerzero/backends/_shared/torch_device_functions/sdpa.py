"""Dense attention by the kernels torch brings: the function one writes, and each of its implementations by itself.

torch aligns `is_causal` top-left where its flash kernel and LayerZero align bottom-right: the two agree where there are
as many queries as keys. A single query is the last position, and causal takes nothing from it.

Kernels find the largest score among the unscaled products, so scales are made positive first; and they load 16 bytes at
a time, which operands with odd strides are copied for. A mask is built on the device, anew for each call.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import Turned, direct

from ..operands import is_positive, positive, readable
from ..seeded_dropout import seeded
from ..torch_functions.attention import as_given, distances, reachable, split_mask, with_sinks
from ..traced_tensors import start_of

_sdpa = torch._C._nn.scaled_dot_product_attention
_math = torch._C._VariableFunctions._scaled_dot_product_attention_math
_flash = torch._C._VariableFunctions._scaled_dot_product_flash_attention
_cudnn = torch._C._VariableFunctions._scaled_dot_product_cudnn_attention
_efficient = torch._C._VariableFunctions._scaled_dot_product_efficient_attention
_flash_in_window = torch.ops.aten._flash_attention_forward.default
_efficient_in_window = torch.ops.aten._efficient_attention_forward.default

_INFINITY = math.inf
_LOAD = 16
# What aten calls a mask that leaves each query the keys up to its own position, aligned bottom-right.
_CAUSAL_FROM_BOTTOM_RIGHT = 2
# Rows of a bias begin on multiples of so many elements.
_BIAS_STEP = 8
# Boolean masks from this size on are read by words.
_LARGE_MASK = 1 << 20


def _fits(tensor: Tensor) -> bool:
    """Whether kernels can load from it as it lies; heads they cannot load at all are padded, or go to matrix products."""
    if tensor.is_contiguous() and start_of(tensor) % _LOAD == 0:
        return True
    return tensor.shape[-1] * tensor.element_size() % _LOAD != 0 or readable(tensor)


def _loadable(tensor: Tensor) -> Tensor:
    return tensor if _fits(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _heads_first(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in the order batch, heads, sequence, element."""
    return _loadable(tensor).transpose(1, 2) if layout == "BSHD" else _loadable(tensor)


def _sequence_first(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in the order batch, sequence, heads, element."""
    return _loadable(tensor).transpose(1, 2) if layout == "BHSD" else _loadable(tensor)


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
) -> Tensor:
    """torch's function; heads first."""
    grouped = bool(query.shape[1] != key.shape[1])
    if dropout_p > 0.0:
        with seeded(query.device, seed):
            return _sdpa(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=grouped)
    return _sdpa(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> tuple[Any, ...] | None:
    """torch's own call, where no argument has to be copied and nothing is drawn."""
    plain = dropout_p == 0.0 and is_positive(query, scale)
    if not plain or not all(_fits(tensor) for tensor in (query, key, value)):
        return None
    at, sequence = (1, 2) if layout == "BHSD" else (2, 1)
    keywords: dict[str, Any] = {"is_causal": True} if causal and query.shape[sequence] != 1 else {}
    if scale is not None:
        keywords["scale"] = scale
    if query.shape[at] != key.shape[at]:
        keywords["enable_gqa"] = True
    given: tuple[Any, ...] = (query, key, value)
    if layout == "BSHD":
        given = Turned(query), Turned(key), Turned(value)
    return _sdpa, given, keywords


@direct(_sdpa_call)
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which chooses among its implementations."""
    query, scale = positive(query, scale)
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    output = _attend(query, key, value, None, bool(causal and query.shape[2] != 1), scale, dropout_p, seed)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _sdpa_cross_call(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout_p: float, seed: int, layout: str
) -> tuple[Any, ...] | None:
    return _sdpa_call(query, key, value, False, scale, dropout_p, seed, layout)


@direct(_sdpa_cross_call)
def sdpa_cross(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout_p: float, seed: int, layout: str
) -> Tensor:
    """The same, to another sequence."""
    return sdpa(query, key, value, False, scale, dropout_p, seed, layout)


def _masked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
    layout: str,
) -> tuple[Any, ...] | None:
    """torch's own call under the mask that is given and nothing else, or of one query in a window, where no argument has to be
    copied and nothing is drawn."""
    at, sequence = (1, 2) if layout == "BHSD" else (2, 1)
    decodes = query.shape[sequence] == 1
    if alibi_slopes is not None or dropout_p > 0.0 or not is_positive(query, scale):
        return None
    if not all(_fits(one) for one in (query, key, value)):
        return None
    keywords: dict[str, Any] = {} if scale is None else {"scale": scale}
    if query.shape[at] != key.shape[at]:
        keywords["enable_gqa"] = True
    given: tuple[Any, ...] = (query, key, value)
    if layout == "BSHD":
        given = Turned(query), Turned(key), Turned(value)
    if attn_mask is None:
        keywords["first"] = _first_reached(key.shape[sequence], window_left)
        return (_of_the_last, given, keywords) if decodes else None
    if window_left >= 0 or window_right >= 0 or (causal and not decodes):
        return None
    if _wants_gradients(attn_mask) or not _is_at_a_bound(attn_mask):
        return None
    return _under_mask, (*given, attn_mask), keywords


def _first_reached(seq_k: int, window_left: int) -> int:
    """The first key that the last position reaches."""
    return max(seq_k - 1 - window_left, 0) if window_left >= 0 else 0


def _of_the_last(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """torch's function for the last position, which reaches the keys from `first` on; heads first."""
    output: Tensor = _sdpa(query, key[:, :, first:], value[:, :, first:], scale=scale, enable_gqa=enable_gqa)
    return output


def _under_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """torch's function under a mask; heads first."""
    return _nothing_is_zero(_sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa), mask)


@direct(_masked_call)
def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """The same under a mask: the one that is given, windows, causal bounds that are not square, linear biases."""
    plan = _masked_call(
        query, key, value, attn_mask, alibi_slopes, causal, scale, window_left, window_right, dropout_p, seed, layout
    )
    query, scale = positive(query, scale)
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    if plan is not None:
        # The same call as on the straight path: what autograd saves must not depend on the way a call took.
        given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        output: Tensor = plan[0](*given, **plan[2])
        return output.transpose(1, 2) if layout == "BSHD" else output
    seq_q, seq_k = query.shape[2], key.shape[2]
    if seq_q == 1 and attn_mask is None and alibi_slopes is None:
        first = _first_reached(seq_k, window_left)
        output = _attend(query, key[:, :, first:], value[:, :, first:], None, False, scale, dropout_p, seed)
        return output.transpose(1, 2) if layout == "BSHD" else output
    mask = _mask(query, key, attn_mask, alibi_slopes, causal, (window_left, window_right))
    if _wants_gradients(mask):
        # Not every implementation has a gradient for the mask.
        with seeded(query.device, seed) if dropout_p > 0.0 else nullcontext():
            grouped = bool(query.shape[1] != key.shape[1])
            output = _math(query, key, value, mask, dropout_p, scale=scale, enable_gqa=grouped)[0]
    else:
        output = _attend(query, key, value, _at_a_bound(mask), False, scale, dropout_p, seed)
    # By position alone every query reaches itself, unless there are more of them than keys.
    if attn_mask is not None or seq_q > seq_k:
        output = _nothing_is_zero(output, mask)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _masked_cross_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> tuple[Any, ...] | None:
    return _masked_call(query, key, value, attn_mask, None, False, scale, -1, -1, dropout_p, seed, layout)


@direct(_masked_cross_call)
def masked_cross(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """The same, to another sequence."""
    return masked(query, key, value, attn_mask, None, False, scale, -1, -1, dropout_p, seed, layout)


def _literal_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> tuple[Any, ...] | None:
    return _masked_call(query, key, value, attn_mask, None, causal, scale, -1, -1, dropout_p, seed, layout)


@direct(_literal_call)
def literal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """torch's function under the mask that is given, and nothing else."""
    return masked(query, key, value, attn_mask, None, causal, scale, -1, -1, dropout_p, seed, layout)


def _mask(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    causal: bool,
    reach: tuple[int, int],
) -> Tensor:
    """All that keeps queries from keys, and all that is added to scores, as one mask."""
    allowed, bias = split_mask(attn_mask, reachable(query, key, causal, reach))
    if alibi_slopes is not None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        distance = distances(query.shape[2], key.shape[2], query.device).to(work)
        slopes = (alibi_slopes.to(work)[:, None, None] * -distance)[None]
        bias = slopes if bias is None else bias + slopes
    if bias is None:
        assert allowed is not None
        return allowed
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -_INFINITY)
    return bias.to(query.dtype)


def _is_at_a_bound(mask: Tensor) -> bool:
    """Whether kernels can load from a mask as it lies; boolean ones are copied by torch."""
    return mask.dtype == torch.bool or (mask.stride(-1) == 1 and start_of(mask) % _LOAD == 0)


def _at_a_bound(mask: Tensor) -> Tensor:
    return mask if _is_at_a_bound(mask) else mask.clone(memory_format=torch.contiguous_format)


def _nothing_is_zero(output: Tensor, mask: Tensor) -> Tensor:
    """A query that may attend to nothing gives zeros. cuDNN's kernel gives something else where torch writes a boolean mask as
    0 and -65504, not minus infinity. For a boolean mask this is two launches; whether there is such a query at all is not
    asked, since the host would wait for the answer."""
    return torch.where(_reaches(mask), output, 0.0)


def _reaches(mask: Tensor) -> Tensor:
    """Which queries of a mask may attend to a key."""
    if mask.dtype != torch.bool:
        return mask.amax(-1, keepdim=True) != -_INFINITY
    whole = mask.is_contiguous() and mask.shape[-1] % 8 == int(mask.storage_offset()) % 8 == 0
    if mask.numel() >= _LARGE_MASK and whole:
        # Eight at a time: a kernel that reads single bytes takes longer than the memory needs.
        mask = mask.view(torch.int64)
    return mask.any(-1, keepdim=True)


def grouped(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window_left: int, layout: str) -> Tensor:
    """The same of one query per head: the heads that share a key/value head stand where its queries would, so that keys
    and values are read once for all of them."""
    query, scale = positive(query, scale)
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    batch, heads, _, head_dim = query.shape
    if first := _first_reached(key.shape[2], window_left):
        key, value = key[:, :, first:], value[:, :, first:]
    queries = query.reshape(batch, key.shape[1], -1, head_dim)
    output = _sdpa(queries, key, value, scale=scale).reshape(batch, heads, 1, value.shape[3])
    return output.transpose(1, 2) if layout == "BSHD" else output


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """torch's FlashAttention 2, windows included. It is aligned bottom-right, and reads shared heads once."""
    output, _ = _flash_heads_first(query, key, value, causal, scale, window_left, window_right, layout)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _flash_heads_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """What it gives, and the logarithms of the softmaxes' sums; heads first."""
    query, scale = positive(query, scale)
    if window_left < 0 and window_right < 0:
        query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
        output, lse = _flash(query, key, value, 0.0, causal, False, scale=scale)[:2]
        return output, lse
    query, key, value = (_sequence_first(tensor, layout) for tensor in (query, key, value))
    output, lse = _flash_in_window(
        query,
        key,
        value,
        None,
        None,
        query.shape[1],
        key.shape[1],
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )[:2]
    return output.transpose(1, 2), lse


def flash_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """torch's FlashAttention 2 with the logarithms of the softmaxes' sums. Every query attends to a key."""
    given = _flash_heads_first(query, key, value, causal, scale, window_left, window_right, layout)
    return as_given(*given, layout)


def flash_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """torch's FlashAttention 2, whose result is made smaller by the share of the sinks."""
    output, lse = _flash_heads_first(query, key, value, causal, scale, window_left, window_right, layout)
    output = output if sinks is None else with_sinks(output, lse, sinks[:, None])
    return output.transpose(1, 2) if layout == "BSHD" else output


def flash_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """The same, to another sequence."""
    return flash(query, key, value, False, scale, -1, -1, layout)


def cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str) -> Tensor:
    """cuDNN's attention; it is aligned top-left, and reads shared heads once."""
    query, scale = positive(query, scale)
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    causal = bool(causal and query.shape[2] != 1)
    wanted = _wants_gradients(query, key, value)
    output = _cudnn(query, key, value, None, wanted, 0.0, causal, False, scale=scale)[0]
    return output.transpose(1, 2) if layout == "BSHD" else output


def cudnn_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """The same, to another sequence."""
    return cudnn(query, key, value, False, scale, layout)


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    layout: str,
) -> Tensor:
    """torch's memory-efficient attention: float32 too, masks, windows to the left; heads are not shared."""
    query, scale = positive(query, scale)
    wanted = _wants_gradients(query, key, value, attn_mask)
    output: Tensor
    sequence = 1 if layout == "BSHD" else 2
    seq_q, seq_k = query.shape[sequence], key.shape[sequence]
    if causal and (seq_q not in (1, seq_k) or 0 <= window_left < seq_k - 1):
        query, key, value = (_sequence_first(tensor, layout) for tensor in (query, key, value))
        # Its window counts the query's own position.
        window = window_left + 1 if window_left >= 0 else None
        output = _efficient_in_window(
            query, key, value, None, None, None, None, None, 0.0, _CAUSAL_FROM_BOTTOM_RIGHT, wanted,
            scale=scale, window_size=window,
        )[0]  # fmt: skip
        return output.transpose(1, 2) if layout == "BHSD" else output
    query, key, value = (_heads_first(tensor, layout) for tensor in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, seq_k)
    output = _efficient(query, key, value, bias, wanted, 0.0, bool(causal and seq_q != 1), scale=scale)[0]
    if attn_mask is not None:
        output = _nothing_is_zero(output, attn_mask)
    return output.transpose(1, 2) if layout == "BSHD" else output


def efficient_cross(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, layout: str
) -> Tensor:
    """The same, to another sequence."""
    return efficient(query, key, value, attn_mask, False, scale, -1, layout)


def _bias(attn_mask: Tensor, query: Tensor, seq_k: int) -> Tensor:
    """A mask as a bias the memory-efficient kernel can load from, for every head."""
    if attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill_(~attn_mask, -_INFINITY)
    if seq_k % _BIAS_STEP:
        attn_mask = torch.nn.functional.pad(attn_mask, (0, -seq_k % _BIAS_STEP))[..., :seq_k]
    elif not readable(attn_mask):
        attn_mask = attn_mask.clone(memory_format=torch.contiguous_format)
    return attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], seq_k)
