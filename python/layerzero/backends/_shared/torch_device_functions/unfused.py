"""Attention composed of matrix products, without a step that waits for the device.

Scores and weights are in float32, or float64 for such inputs. Products of half-width floats are summed and given in
float32 by tensor cores; where gradients are wanted the operands are widened instead, since such a product has none.
"""

import math

import torch
from torch import Tensor

from ..torch_functions.attention import distances, log_sum, reachable, split_mask, unfused_lse_with

_safe_softmax = torch._C._VariableFunctions._safe_softmax
_INFINITY = math.inf
HALVES = (torch.float16, torch.bfloat16)


def product(x: Tensor, y: Tensor, narrow: bool) -> Tensor:
    """The product of batches of matrices in float32 (float64 of such); `narrow` operands stay as they are."""
    if narrow:
        return torch.bmm(x, y, out_dtype=torch.float32)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.bmm(x.to(work), y.to(work))


def stays_narrow(query: Tensor, *others: Tensor | None) -> bool:
    """Whether products may take half-width operands as they are."""
    # AMD GPUs are `cuda` to torch as well.
    if query.dtype not in HALVES or not query.is_cuda or torch.version.hip is not None or query.numel() == 0:
        return False
    wanted = any(t is not None and t.requires_grad for t in (query, *others))
    return not (wanted and torch.is_grad_enabled())


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
    """Attention of tensors in the order batch, heads, sequence, element.

    `allowed` (boolean) and `bias` (added to the scores) broadcast to batch, heads, queries, keys; `sinks` to the same, with
    one key.
    """
    scores = _scores(query, key, scale, allowed, bias, softcap)
    if sinks is not None:
        joined = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)), -1)
        weights = _safe_softmax(joined, -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1) if allowed is None and bias is None else _safe_softmax(scores, -1)
    if dropout_p > 0.0:
        generator = torch.Generator(query.device).manual_seed(seed)
        kept = torch.rand(weights.shape, dtype=weights.dtype, device=query.device, generator=generator) >= dropout_p
        weights = weights * kept / (1.0 - dropout_p)
    return _output(weights, query, key, value, bias)


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
    return _output(_safe_softmax(scores, -1), query, key, value, None), log_sum(scores)


def _scores(
    query: Tensor, key: Tensor, scale: float | None, allowed: Tensor | None, bias: Tensor | None, softcap: float
) -> Tensor:
    """Scores in float32 or wider, minus infinity where a query may not attend."""
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_k = key.shape[1], key.shape[2]
    rows = heads // max(kv_heads, 1) * seq_q
    if scale is None:
        scale = 1.0 / math.sqrt(max(head_dim, 1))
    narrow = stays_narrow(query, key, bias) and key.numel() > 0
    # Queries that share a key/value head are rows of one product.
    queries = query.reshape(batch * kv_heads, rows, head_dim)
    keys = key.reshape(batch * kv_heads, seq_k, head_dim)
    scores = product(queries, keys.transpose(1, 2), narrow).view(batch, heads, seq_q, seq_k)
    scores = scores.mul_(scale)
    if softcap > 0.0:
        scores = scores.div(softcap).tanh() * softcap if scores.requires_grad else _capped(scores, softcap)
    if bias is not None:
        # Where minus infinity is added there is no weight, even of a NaN.
        scores = scores.add_(bias.to(scores.dtype)).masked_fill_(bias == -_INFINITY, -_INFINITY)
    if allowed is not None:
        scores = scores.masked_fill_(~allowed, -_INFINITY)
    return scores


def _output(weights: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of values by weight."""
    batch, heads, seq_q, seq_k = weights.shape
    kv_heads, v_dim = value.shape[1], value.shape[3]
    narrow = stays_narrow(query, key, value, bias) and key.numel() > 0 and value.numel() > 0
    weights = weights.reshape(batch * kv_heads, heads // max(kv_heads, 1) * seq_q, seq_k)
    values = value.reshape(batch * kv_heads, seq_k, v_dim)
    output = torch.bmm(weights.to(query.dtype), values) if narrow else torch.bmm(weights, values.to(weights.dtype))
    return output.view(batch, heads, seq_q, v_dim).to(query.dtype)


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


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
    """Dense attention; takes every argument."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    reach = (window_left, window_right)
    allowed = None if _reaches_all(query, key, causal, reach) else reachable(query, key, causal, reach)
    allowed, bias = split_mask(attn_mask, allowed)
    if alibi_slopes is not None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        distance = distances(query.shape[2], key.shape[2], query.device).to(work)
        slopes = alibi_slopes.to(work)[:, None, None] * -distance
        bias = slopes if bias is None else bias + slopes
    columns = None if sinks is None else sinks[:, None, None]
    output = attend(query, key, value, scale, allowed, bias, softcap, dropout_p, seed, columns)
    return output.transpose(1, 2).contiguous() if layout == "BSHD" else output


unfused_lse = unfused_lse_with(attend_lse)


def _reaches_all(query: Tensor, key: Tensor, causal: bool, reach: tuple[int, int]) -> bool:
    """Whether a single query, the last position, reaches every key."""
    left, seq_k = reach[0], key.shape[2]
    return query.shape[2] == 1 and seq_k > 0 and (left < 0 or left >= seq_k - 1)


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
    """Attention to another sequence; takes every argument."""
    return unfused(query, key, value, attn_mask, None, None, False, scale, -1, -1, softcap, dropout_p, seed, layout)
