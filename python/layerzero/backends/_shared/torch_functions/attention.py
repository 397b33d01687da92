"""Dense attention: torch's flash and math kernels, and a composition that serves every call.

In torch's own kernels a value that gets no weight is multiplied by zero, so that a NaN among such values, behind the
causal bound or masked out, reaches other rows. The composition keeps it out.

The public functions are kernels. Tensors inside are in the order batch, heads, sequence, element.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import Turned, direct

from ..blocks import HALF
from ..dense_attention import Call, lse_kernel
from ..operands import is_positive, positive
from ..traced_tensors import is_traced

_sdpa = torch._C._nn.scaled_dot_product_attention
_flash = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu
_math = torch._C._VariableFunctions._scaled_dot_product_attention_math
_safe_softmax = torch._C._VariableFunctions._safe_softmax
_INFINITY = math.inf
EVERYWHERE = (-1, -1)
"""No window to either side."""

FEWEST_KEYS = 16
"""What torch's flash kernel needs to keep a NaN: at fewer keys than a vector register holds it takes a row whose scores are
all NaN for one that is masked out. Registers of 512 bits hold this many. Only torch's own call is made with fewer."""

MOST_ROWS = 4096
"""How many queries the flash kernel may add up gradients of keys and values over in half precision. It rounds the sum
after every 256 of them, so that the error grows with their number; beyond this it works on float32 copies."""


def _wide_gradients(seq_q: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether gradients are wanted that the flash kernel would lose in half precision."""
    if seq_q <= MOST_ROWS or query.dtype not in HALF or not torch.is_grad_enabled():
        return False
    return query.requires_grad or key.requires_grad or value.requires_grad


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    reach: tuple[int, int],
    sinks: Tensor | None = None,
) -> Tensor:
    """Flash attention without a mask argument; `reach` is the window to the left and to the right. `sinks` broadcast to
    batch, heads, queries; they have no gradient."""
    if key.shape[2] < FEWEST_KEYS:
        allowed = reachable(query, key, causal, reach)
        return attend(query, key, value, scale, allowed, sinks=None if sinks is None else sinks[..., None])
    output, lse = attend_flash_lse(query, key, value, causal, scale, reach)
    return output if sinks is None else with_sinks(output, lse, sinks)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """What attention with sinks gives, from what it gives without: exp(lse) / (exp(lse) + exp(sink)) of it."""
    work = torch.float64 if output.dtype == torch.float64 else torch.float32
    share = torch.sigmoid(lse.to(work) - sinks.to(work))
    return (output * share[..., None]).to(output.dtype)


def attend_flash_lse(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, reach: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The same, and the logarithms of the softmaxes' sums: batch, heads, queries."""
    seq_q, seq_k = query.shape[2], key.shape[2]
    if seq_k < FEWEST_KEYS:
        return attend_lse(query, key, value, scale, reachable(query, key, causal, reach))
    if reach == EVERYWHERE and (not causal or seq_q == 1 or seq_q == seq_k):
        # The last query attends to every key: causal takes nothing from it.
        query, scale = positive(query, scale)
        output, lse = _flash(query, key, value, 0.0, bool(causal and seq_q != 1), scale=scale)
        return output, lse
    allowed = reachable(query, key, causal, reach)
    assert allowed is not None
    output, lse = _flash(query, key, value, attn_mask=_additive(allowed, query), scale=scale)
    if seq_q <= seq_k:
        return output, lse
    return _nothing_is_zero(output, allowed), lse.masked_fill(~allowed.any(-1), -_INFINITY)


def _has_nan(tensor: Tensor) -> bool:
    """Whether there may be a NaN: the sum of a tensor that holds one is NaN. A compiler traces tensors without values."""
    if is_traced():
        return False
    return math.isnan(tensor.sum().item())


def _nothing_is_zero(output: Tensor, allowed: Tensor) -> Tensor:
    """A query that may attend to nothing gives zeros, even a query that is NaN."""
    return output.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _additive(allowed: Tensor, like: Tensor) -> Tensor:
    """Zero where `allowed`, minus infinity elsewhere."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.zeros(allowed.shape, dtype=dtype, device=like.device).masked_fill_(~allowed, -_INFINITY)


def reachable(query: Tensor, key: Tensor, causal: bool, reach: tuple[int, int]) -> Tensor | None:
    """Which keys a query reaches by position, or `None` for all; aligned bottom-right."""
    left, right = reach
    if causal:
        right = 0
    if left < 0 and right < 0:
        return None
    seq_q, seq_k = query.shape[2], key.shape[2]
    longest, offset = seq_q + seq_k, seq_k - seq_q
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool, device=query.device)
    if right >= 0:
        allowed.tril_(offset + min(right, longest))
    if left >= 0:
        allowed.triu_(offset - min(left, longest))
    return allowed


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention composed of matrix products, in float32 or wider.

    `allowed` (boolean) and `bias` (added to the scores) broadcast to batch, heads, queries, keys; `sinks` to the same, with
    one key.
    """
    scores = _scores(query, key, scale, allowed, bias, softcap)
    if sinks is None:
        weights = _safe_softmax(scores, -1)
    else:
        joined = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)), -1)
        weights = _safe_softmax(joined, -1)[..., :-1]
    kept = None
    if dropout_p > 0.0:
        generator = torch.Generator(query.device).manual_seed(seed)
        kept = torch.rand(weights.shape, dtype=weights.dtype, device=query.device, generator=generator) >= dropout_p
        weights = weights * kept / (1.0 - dropout_p)
    return _output(weights, scores, kept, value, query.dtype)


def attend_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    allowed: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same, and the logarithms of the softmaxes' sums: batch, heads, queries."""
    scores = _scores(query, key, scale, allowed, None, softcap)
    return _output(_safe_softmax(scores, -1), scores, None, value, query.dtype), log_sum(scores)


def log_sum(scores: Tensor) -> Tensor:
    """The logarithm of the sum of the exponentials of scores; minus infinity, without a gradient, where there are none."""
    nothing = (scores == -_INFINITY).all(-1)
    return torch.logsumexp(scores.masked_fill(nothing[..., None], 0.0), -1).masked_fill(nothing, -_INFINITY).float()


def _scores(
    query: Tensor, key: Tensor, scale: float | None, allowed: Tensor | None, bias: Tensor | None, softcap: float
) -> Tensor:
    """Scores in float32 or wider, minus infinity where a query may not attend."""
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_k = key.shape[1], key.shape[2]
    rows = heads // max(kv_heads, 1) * seq_q
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = 1.0 / math.sqrt(max(head_dim, 1))
    # Queries that share a key/value head are rows of one product.
    queries = (query.to(work) * scale).reshape(batch, kv_heads, rows, head_dim)
    scores = torch.matmul(queries, key.to(work).transpose(2, 3)).view(batch, heads, seq_q, seq_k)
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        # Where minus infinity is added there is no weight, even of a NaN.
        scores.add_(bias.to(work)).masked_fill_(bias == -_INFINITY, -_INFINITY)
    if allowed is not None:
        scores.masked_fill_(~allowed, -_INFINITY)
    return scores


def _output(weights: Tensor, scores: Tensor, kept: Tensor | None, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of values by weight. `kept`: which weights were not dropped."""
    batch, heads, seq_q, seq_k = weights.shape
    values = value.to(weights.dtype)
    weights = weights.reshape(batch, value.shape[1], heads // max(value.shape[1], 1) * seq_q, seq_k)
    output = torch.matmul(weights, values)
    if _has_nan(output):
        takes_part = (scores != -_INFINITY) if kept is None else (scores != -_INFINITY) & kept
        output = _weighted_sum(weights, takes_part.view(weights.shape).to(weights.dtype), values)
    return output.view(batch, heads, seq_q, value.shape[3]).to(dtype)


def _weighted_sum(weights: Tensor, takes_part: Tensor, values: Tensor) -> Tensor:
    """`weights @ values` where a value that takes no part does not count, not even one that is not finite."""
    output = torch.matmul(weights, torch.where(values.isfinite(), values, 0.0))
    nan = torch.matmul(takes_part, values.isnan().to(values.dtype)) > 0.0
    plus = torch.matmul(takes_part, (values == _INFINITY).to(values.dtype)) > 0.0
    minus = torch.matmul(takes_part, (values == -_INFINITY).to(values.dtype)) > 0.0
    output = torch.where(plus, _INFINITY, output)
    output = torch.where(minus, -_INFINITY, output)
    # A NaN weight makes its whole row NaN, infinite values included.
    return torch.where(nan | (plus & minus) | weights.isnan().any(-1, keepdim=True), math.nan, output)


def _sdpa_flash_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> tuple[Any, ...] | None:
    """The literal call, wherever it means the same: a mask, or nothing masked but the future."""
    at, sequence = (1, 2) if layout == "BHSD" else (2, 1)
    heads, kv_heads, seq_q, seq_k = query.shape[at], key.shape[at], query.shape[sequence], key.shape[sequence]
    if window_left >= 0 or window_right >= 0 or _wide_gradients(seq_q, query, key, value):
        return None
    keywords: dict[str, Any] = {}
    if attn_mask is not None:
        same = attn_mask.dtype in (torch.bool, query.dtype)
        if causal or not same or attn_mask.dim() < 2 or attn_mask.requires_grad:
            return None
        keywords["attn_mask"] = attn_mask
    elif causal and seq_q != 1:
        if seq_q != seq_k or not is_positive(query, scale):
            return None
        keywords["is_causal"] = True
    if scale is not None:
        keywords["scale"] = scale
    if heads != kv_heads:
        keywords["enable_gqa"] = True
    given: tuple[Any, ...] = (query, key, value)
    if layout == "BSHD":
        given = Turned(query), Turned(key), Turned(value)
    return _sdpa, given, keywords


@direct(_sdpa_flash_call)
def sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """torch's flash attention for the CPU."""
    plan = _sdpa_flash_call(query, key, value, attn_mask, causal, scale, window_left, window_right, layout)
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if plan is not None:
        # The same call as on the straight path: what autograd saves must not depend on the way a call took.
        output: Tensor = plan[0](query, key, value, **plan[2])
    elif attn_mask is None:
        seq_q, seq_k = query.shape[2], key.shape[2]
        if seq_q > MOST_ROWS and _wide_gradients(seq_q, query, key, value):
            reach = (window_left, window_right)
            output = attend_flash(query.float(), key.float(), value.float(), causal, scale, reach).to(query.dtype)
        elif window_left < 0 and window_right < 0 and (not causal or seq_q == seq_k):
            # Causal, with a scale that is not positive.
            query, scale = positive(query, scale)
            output = _sdpa(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        else:
            output = attend_flash(query, key, value, causal, scale, (window_left, window_right))
    else:
        allowed = reachable(query, key, causal, (window_left, window_right))
        if _wide_gradients(query.shape[2], query, key, value):
            wide = query.float(), key.float(), value.float()
            output = _flash_with_mask(*wide, attn_mask, scale, allowed).to(query.dtype)
        else:
            output = _flash_with_mask(query, key, value, attn_mask, scale, allowed)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _sdpa_flash_cross_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, layout: str
) -> tuple[Any, ...] | None:
    return _sdpa_flash_call(query, key, value, attn_mask, False, scale, -1, -1, layout)


@direct(_sdpa_flash_cross_call)
def sdpa_flash_cross(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, layout: str
) -> Tensor:
    """torch's flash attention for the CPU, to another sequence."""
    return sdpa_flash(query, key, value, attn_mask, False, scale, -1, -1, layout)


def sdpa_flash_grouped(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window_left: int, layout: str
) -> Tensor:
    """torch's flash attention for the CPU of one query per head. The heads that share a key/value head stand where its
    queries would, so that keys and values are read once for all of them."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seq_k = key.shape[2]
    if 0 <= window_left < seq_k - 1:
        first = seq_k - 1 - window_left
        key, value, seq_k = key[:, :, first:], value[:, :, first:], window_left + 1
    batch, heads, _, head_dim = query.shape
    if seq_k < FEWEST_KEYS:
        output = attend(query, key, value, scale)
    else:
        queries = query.reshape(batch, key.shape[1], -1, head_dim)
        output = _flash(queries, key, value, 0.0, False, scale=scale)[0].reshape(batch, heads, 1, head_dim)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _flash_with_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None, allowed: Tensor | None
) -> Tensor:
    allowed, bias = split_mask(attn_mask, allowed)
    if bias is None:
        assert allowed is not None
        mask = _additive(allowed, query)
    elif bias.requires_grad:
        # The flash kernel has no gradient for its mask.
        return attend(query, key, value, scale, allowed, bias)
    else:
        mask = bias.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
        if allowed is not None:
            mask = mask.masked_fill(~allowed, -_INFINITY)
    return _nothing_is_zero(_flash(query, key, value, attn_mask=mask, scale=scale)[0], mask != -_INFINITY)


def split_mask(attn_mask: Tensor | None, allowed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A mask as what it allows (together with `allowed`) and what it adds."""
    if attn_mask is None:
        return allowed, None
    if attn_mask.dtype != torch.bool:
        return allowed, attn_mask
    return (attn_mask if allowed is None else attn_mask & allowed), None


def sdpa_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """torch's composed attention."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seq_q, heads = query.shape[2], query.shape[1]
    mask = allowed = bias = None
    top_left = False
    if attn_mask is not None or window_left >= 0 or window_right >= 0 or (causal and seq_q != 1):
        if attn_mask is None and window_left < 0 and window_right < 0 and seq_q == key.shape[2]:
            top_left = True
        else:
            allowed = reachable(query, key, causal, (window_left, window_right))
            allowed, bias = split_mask(attn_mask, allowed)
            mask = bias
            if allowed is not None:
                mask = _additive(allowed, query) if mask is None else mask.masked_fill(~allowed, -_INFINITY)
    output = _math(query, key, value, mask, 0.0, top_left, scale=scale, enable_gqa=bool(heads != key.shape[1]))[0]
    if mask is not None and (attn_mask is not None or seq_q > key.shape[2]):
        output = _nothing_is_zero(output, mask != -_INFINITY)
    return output.transpose(1, 2).contiguous() if layout == "BSHD" else output


def sdpa_math_cross(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, layout: str
) -> Tensor:
    """torch's composed attention, to another sequence."""
    return sdpa_math(query, key, value, attn_mask, False, scale, -1, -1, layout)


def unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Attention composed of matrix products; takes every argument."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    allowed, bias = split_mask(attn_mask, reachable(query, key, causal, (window_left, window_right)))
    if alibi_slopes is not None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        distance = distances(query.shape[2], key.shape[2], query.device).to(work)
        slopes = alibi_slopes.to(work)[:, None, None] * -distance
        bias = slopes if bias is None else bias + slopes
    columns = None if sinks is None else sinks[:, None, None]
    output = attend(query, key, value, scale, allowed, bias, softcap, dropout_p, seed, columns)
    return output.transpose(1, 2).contiguous() if layout == "BSHD" else output


def sdpa_flash_sinks(
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
    """torch's flash attention for the CPU, whose result is made smaller by the share of the sinks."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rows = None if sinks is None else sinks[:, None]
    output = attend_flash(query, key, value, causal, scale, (window_left, window_right), rows)
    return output.transpose(1, 2) if layout == "BSHD" else output


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
    """torch's flash attention for the CPU, with its logarithms."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return as_given(*attend_flash_lse(query, key, value, causal, scale, (window_left, window_right)), layout)


def unfused_lse_with(attend_lse: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel of matrix products that also gives the logarithms of the softmaxes' sums; takes every argument."""

    def run(call: Call) -> tuple[Tensor, Tensor]:
        query, key, value = call.operands
        if call.layout == "BSHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        allowed = reachable(query, key, call.causal, call.window)
        return as_given(*attend_lse(query, key, value, call.scale, allowed, call.softcap), call.layout)

    return lse_kernel(run)


unfused_lse = unfused_lse_with(attend_lse)


def as_given(output: Tensor, lse: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Result and logarithms, heads first, in the order of the call's layout."""
    if layout == "BSHD":
        output, lse = output.transpose(1, 2), lse.transpose(1, 2)
    return output.contiguous(), lse.float().contiguous()


def unfused_cross(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    seed: int,
    layout: str,
) -> Tensor:
    """Attention to another sequence, composed of matrix products; takes every argument."""
    return unfused(query, key, value, attn_mask, None, None, False, scale, -1, -1, softcap, dropout_p, seed, layout)


def distances(seq_q: int, seq_k: int, device: torch.device) -> Tensor:
    """How far each key is from each query, aligned bottom-right."""
    position = torch.arange(seq_k - seq_q, seq_k, device=device)
    return (position[:, None] - torch.arange(seq_k, device=device)).abs()
