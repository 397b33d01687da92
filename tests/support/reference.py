"""What every operation gives, in float64: written from the operation schemas alone, plain loops over numpy arrays.

Arrays come in the caller's layout and go out in it. An `Answer` also carries `growth`: how far a correct evaluation in
a narrower arithmetic may legitimately be off, in units of that arithmetic's roundoff u. A sum of n products is off by
at most n * u * sum|terms| whatever the order of summation; the formulas below carry that bound through to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Window = tuple[int, int]
UNBOUNDED: Window = (-1, -1)


@dataclass(frozen=True)
class Answer:
    """A result, the roundoffs it may be off by beyond the dtype's tolerance, and where it may be NaN instead."""

    values: Array
    growth: Array | float = 0.0
    may_be_nan: Array | bool = False


# --- attention --------------------------------------------------------------------------------------------------------


def attend(
    q: Array,
    keys: Array,
    values: Array,
    scale: float,
    softcap: float = 0.0,
    bias: Array | None = None,
    sink: float = -np.inf,
) -> tuple[Array, Array]:
    """One query over the keys that take part in it, all of them; and the growth of the result. A sink is a score without a
    value."""
    if len(keys) == 0:
        zeros = np.zeros(values.shape[-1])
        return zeros, zeros
    scores = scale * (keys @ q)
    if softcap > 0.0:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    weights = weights / (weights.sum() + np.exp(sink - top))
    with np.errstate(invalid="ignore"):
        out = weights @ values
        # A score is off by d = head_dim * u * sum|q k| (and its own magnitude for each rounding on the way to the
        # exponential), which moves a normalized weight by a factor of up to 1 + 2d.
        product = abs(scale) * (np.abs(keys) @ np.abs(q)).max()
        moved = 2.0 * (len(q) * product + 4.0 * np.abs(scores).max()) + len(keys) + 4.0
        return out, moved * (weights @ np.abs(values))


def _reach(position: int, keys: int, causal: bool, window: Window) -> Array:
    """Which keys a query that stands at key `position` may see."""
    index = np.arange(keys)
    seen = np.ones(keys, dtype=bool)
    if causal:
        seen &= index <= position
    if window[0] >= 0:
        seen &= index >= position - window[0]
    if window[1] >= 0:
        seen &= index <= position + window[1]
    return seen


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    attn_mask: Array | None = None,
    alibi_slopes: Array | None = None,
    window: Window = UNBOUNDED,
    softcap: float = 0.0,
    layout: str = "BSHD",
    sinks: Array | None = None,
) -> Answer:
    """Dense attention; a boolean mask says who may attend, any other is added to the scores."""
    if layout == "BSHD":
        query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    batch, heads, seq_q, head_dim = query.shape
    seq_k = key.shape[2]
    group = heads // max(key.shape[1], 1)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    mask = None if attn_mask is None else np.broadcast_to(attn_mask, (batch, heads, seq_q, seq_k))
    out = np.zeros((batch, heads, seq_q, value.shape[3]))
    growth, may_be_nan = np.zeros_like(out), np.zeros(out.shape, dtype=bool)
    for b, h, i in np.ndindex(batch, heads, seq_q):
        position = i + seq_k - seq_q
        seen = _reach(position, seq_k, causal, window)
        bias = np.zeros(seq_k)
        if alibi_slopes is not None:
            bias -= alibi_slopes[h] * np.abs(position - np.arange(seq_k))
        if mask is not None and mask.dtype == bool:
            seen &= mask[b, h, i]
        elif mask is not None:
            # Minus infinity is no weight: such a key does not take part.
            seen &= mask[b, h, i] != -np.inf
            bias = bias + mask[b, h, i]
        keys, values = key[b, h // group], value[b, h // group]
        sink = -np.inf if sinks is None else float(sinks[h])
        seen_values = values[seen]
        out[b, h, i], growth[b, h, i] = attend(
            query[b, h, i], keys[seen], seen_values, scale, softcap, bias[seen], sink
        )
        # What gets no weight may be multiplied by zero: a value spoils its column that way, a key the whole row.
        may_be_nan[b, h, i] = ~np.isfinite(values).all(0) | ~np.isfinite(keys).all()
    if layout == "BSHD":
        out, growth, may_be_nan = (x.transpose(0, 2, 1, 3) for x in (out, growth, may_be_nan))
    return Answer(out, growth, may_be_nan)


def _pages(cache: Array, table: Array, length: int, layout: str) -> Array:
    """The first `length` slots of a sequence's pages, as [length, kv_heads, head_dim]."""
    slots = cache if layout == "NHD" else cache.transpose(0, 2, 1, 3)
    size = slots.shape[1]
    rows = [slots[int(table[j // size]), j % size] for j in range(length)]
    return np.array(rows).reshape(length, *slots.shape[2:])


def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    scale: float | None = None,
    cu_seqlens_q: Array | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    layout: str = "NHD",
    sinks: Array | None = None,
) -> Answer:
    """Attention over pages: one query per sequence, or packed ones that are the last positions of their sequences."""
    rows = query.reshape(-1, *query.shape[-2:])
    starts = np.arange(len(context_lens) + 1) if cu_seqlens_q is None else cu_seqlens_q
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    out, growth = np.zeros(rows.shape), np.zeros(rows.shape)
    for b, length in enumerate(int(n) for n in context_lens):
        keys = _pages(key_cache, block_tables[b], length, layout)
        values = _pages(value_cache, block_tables[b], length, layout)
        group = rows.shape[1] // max(keys.shape[1], 1)
        for t in range(int(starts[b]), int(starts[b + 1])):
            seen = _reach(t + length - int(starts[b + 1]), length, causal, (window_left, -1))
            for h in range(rows.shape[1]):
                k, v = keys[seen, h // group], values[seen, h // group]
                sink = -np.inf if sinks is None else float(sinks[h])
                out[t, h], growth[t, h] = attend(rows[t, h], k, v, scale, softcap, sink=sink)
    return Answer(out.reshape(query.shape), growth.reshape(query.shape))


def varlen_attention(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Answer:
    """Attention within packed sequences."""
    scale = 1.0 / math.sqrt(query.shape[2]) if scale is None else scale
    out = np.zeros((*query.shape[:2], value.shape[2]))
    growth = np.zeros_like(out)
    may_be_nan = np.zeros(out.shape, dtype=bool)
    group = query.shape[1] // max(key.shape[1], 1)
    for b in range(len(cu_seqlens_q) - 1):
        start, end, first, last = (int(x[b + i]) for x in (cu_seqlens_q, cu_seqlens_k) for i in (0, 1))
        for t in range(start, end):
            seen = _reach(t + (last - first) - end, last - first, causal, window)
            for h in range(query.shape[1]):
                k, v = key[first:last, h // group], value[first:last, h // group]
                sink = -np.inf if sinks is None else float(sinks[h])
                out[t, h], growth[t, h] = attend(query[t, h], k[seen], v[seen], scale, softcap, sink=sink)
                # Within a sequence, as of dense attention.
                may_be_nan[t, h] = ~np.isfinite(v).all(0) | ~np.isfinite(k).all()
    return Answer(out, growth, may_be_nan)


def mla_attention(
    q_nope: Array,
    q_pe: Array,
    ckv: Array,
    kpe: Array,
    scale: float,
    *,
    causal: bool = True,
    qo_indptr: Array | None = None,
    kv_indptr: Array | None = None,
    block_tables: Array | None = None,
    context_lens: Array | None = None,
) -> Answer:
    """Latent attention: the keys are latent and positional parts side by side, the values the latent part."""
    out, growth = np.zeros(q_nope.shape), np.zeros(q_nope.shape)
    sequences: list[tuple[range, Array, Array]] = []
    if block_tables is not None and context_lens is not None:
        starts = range(len(context_lens) + 1) if qo_indptr is None else [int(x) for x in qo_indptr]
        causal = causal and qo_indptr is not None
        for b, length in enumerate(int(n) for n in context_lens):
            latent = _pages(ckv[:, :, None], block_tables[b], length, "NHD")[:, 0]
            position = _pages(kpe[:, :, None], block_tables[b], length, "NHD")[:, 0]
            sequences.append((range(starts[b], starts[b + 1]), latent, position))
    else:
        latent, position = ckv.reshape(len(ckv), ckv.shape[-1]), kpe.reshape(len(kpe), kpe.shape[-1])
        qo = [0, len(q_nope)] if qo_indptr is None else [int(x) for x in qo_indptr]
        kv = [0, len(latent)] if kv_indptr is None else [int(x) for x in kv_indptr]
        for b in range(len(qo) - 1):
            keys = slice(kv[b], kv[b + 1])
            sequences.append((range(qo[b], qo[b + 1]), latent[keys], position[keys]))
    for rows, latent, position in sequences:
        for t in rows:
            seen = _reach(t + len(latent) - rows.stop, len(latent), causal, UNBOUNDED)
            keys_ = np.concatenate([latent, position], axis=1)[seen]
            for h in range(q_nope.shape[1]):
                q = np.concatenate([q_nope[t, h], q_pe[t, h]])
                out[t, h], growth[t, h] = attend(q, keys_, latent[seen], scale)
    return Answer(out, growth)


def _sparse(query: Array, key: Array, value: Array, scale: float | None, seen: Callable[[int, int], Array]) -> Answer:
    """NHD; `seen(h, i)` tells which keys query i of key/value head h attends to."""
    scale = 1.0 / math.sqrt(query.shape[2]) if scale is None else scale
    group = query.shape[1] // max(key.shape[1], 1)
    out, growth = np.zeros(query.shape), np.zeros(query.shape)
    for i, h in np.ndindex(query.shape[:2]):
        kept = seen(h // group, i)
        out[i, h], growth[i, h] = attend(query[i, h], key[kept, h // group], value[kept, h // group], scale)
    return Answer(out, growth)


def sparse_block(
    query: Array,
    key: Array,
    value: Array,
    indptr: Array,
    indices: Array,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
) -> Answer:
    """Attention within listed blocks of one size."""

    def seen(_: int, i: int) -> Array:
        kept = np.zeros(len(key), dtype=bool)
        row = i // block_rows
        for j in indices[int(indptr[row]) : int(indptr[row + 1])]:
            kept[int(j) * block_cols : (int(j) + 1) * block_cols] = True
        return kept

    return _sparse(query, key, value, scale, seen)


def sparse_variable_block(
    query: Array,
    key: Array,
    value: Array,
    block_mask: Array,
    block_row_sizes: Array,
    block_col_sizes: Array,
    scale: float | None = None,
    layout: str = "HND",
) -> Answer:
    """Attention within a block mask whose rows and columns have sizes of their own, per key/value head."""
    if layout == "HND":
        query, key, value = (x.transpose(1, 0, 2) for x in (query, key, value))
    wide = [
        np.repeat(np.repeat(mask, rows, axis=0), cols, axis=1)
        for mask, rows, cols in zip(block_mask, block_row_sizes, block_col_sizes, strict=True)
    ]
    answer = _sparse(query, key, value, scale, lambda h, i: np.asarray(wide[h][i], dtype=bool))
    if layout == "HND":
        growth = np.broadcast_to(answer.growth, answer.values.shape).transpose(1, 0, 2)
        return Answer(answer.values.transpose(1, 0, 2), growth)
    return answer


# --- rows -------------------------------------------------------------------------------------------------------------


def embedding(indices: Array, weight: Array) -> Answer:
    """Rows of a table."""
    return Answer(weight[indices])


def rms_norm(x: Array, weight: Array | None = None, eps: float = 1e-6) -> Answer:
    """x / sqrt(mean(x^2) + eps) * weight; a sum of squares has no cancellation, so nothing grows."""
    with np.errstate(invalid="ignore", divide="ignore"):
        out = x / np.sqrt((x * x).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
    return Answer(out if weight is None else out * weight)


def fused_add_rms_norm(
    x: Array, residual: Array, weight: Array | None = None, eps: float = 1e-6
) -> tuple[Answer, Answer]:
    """The norm of the sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), Answer(total)


def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5) -> Answer:
    """(x - mean) / sqrt(var + eps) * weight + bias, biased variance."""
    n = max(x.shape[-1], 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        centred = x - x.sum(-1, keepdims=True) / n
        spread = np.sqrt((centred * centred).sum(-1, keepdims=True) / n + eps)
        out = centred / spread
        # The mean is off by u * sum|x|, and so is what is left after subtracting it; the spread is off by as much.
        growth = np.abs(x).sum(-1, keepdims=True) / spread * (1.0 + np.abs(out))
        growth = np.where(np.isfinite(growth), growth, 0.0)
    out, growth = (out, growth) if weight is None else (out * weight, growth * np.abs(weight))
    return Answer(out if bias is None else out + bias, growth)


def rope(
    x: Array, cos: Array, sin: Array, interleaved: bool = False, positions: Array | None = None, layout: str = "BSHD"
) -> Answer:
    """Pair (a, b) at position p becomes (a cos - b sin, b cos + a sin)."""
    tokens = x[None] if layout == "NHD" else x if layout == "BSHD" else x.transpose(0, 2, 1, 3)
    batch, seq, _, head_dim = tokens.shape
    pairs = head_dim // 2 if cos.shape[1] == head_dim else cos.shape[1]
    place = np.broadcast_to(np.arange(seq) if positions is None else positions, (batch, seq)).astype(np.int64)
    c, s = cos[place][:, :, None, :pairs], sin[place][:, :, None, :pairs]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    out = tokens.copy()
    out[..., first] = tokens[..., first] * c - tokens[..., second] * s
    out[..., second] = tokens[..., second] * c + tokens[..., first] * s
    return Answer(out[0] if layout == "NHD" else out if layout == "BSHD" else out.transpose(0, 2, 1, 3))


def alibi_bias(slopes: Array, seq_q: int, seq_k: int) -> Answer:
    """-slope * distance, queries aligned bottom-right."""
    distance = np.abs(np.arange(seq_q)[:, None] + seq_k - seq_q - np.arange(seq_k)[None, :])
    return Answer(-slopes[:, None, None] * distance)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Answer:
    """x . weight^T + bias."""
    out, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if bias is not None:
        out, size = out + bias, size + np.abs(bias)
    return Answer(out, (x.shape[-1] + 1.0) * size)


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x.ravel()]).reshape(x.shape)


def gelu(x: Array, approximate: str = "none") -> Answer:
    """The exact form, or the one by tanh."""
    if approximate == "tanh":
        return Answer(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))
    return Answer(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


def softmax(x: Array) -> Answer:
    """e^(x - max), over its sum, in each row."""
    if x.shape[-1] == 0:
        return Answer(x)
    with np.errstate(invalid="ignore"):
        weights = np.exp(x - x.max(-1, keepdims=True))
        return Answer(weights / weights.sum(-1, keepdims=True))


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1.0 + np.exp(-x)))


def silu_mul(gate: Array, up: Array) -> Answer:
    """silu(gate) * up."""
    return Answer(_silu(gate) * up)


def linear_packed(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    out_features: int,
    interleave: int = 1,
    activation: str = "none",
) -> Answer:
    """act(x . W^T + bias), with a weight in blocks of 32 outputs."""
    rows, columns = np.arange(out_features)[:, None], np.arange(x.shape[-1])
    plain = weight[rows // 32, columns // interleave, rows % 32, columns % interleave]
    sums = linear(x, plain, bias)
    act: dict[str, Callable[[Array], Array]] = {
        "none": lambda v: v,
        "relu": lambda v: np.where(v < 0.0, 0.0, v),
        "gelu": lambda v: gelu(v).values,
        "gelu_tanh": lambda v: gelu(v, "tanh").values,
        "silu": _silu,
    }
    # The activations' slopes are below 1.2.
    return Answer(act[activation](sums.values), 1.2 * np.asarray(sums.growth) + 4.0 * np.abs(sums.values))


def linear_quantized(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    scales: Array,
    out_features: int,
    interleave: int = 1,
    group_size: int = 0,
    activation: str = "none",
) -> Answer:
    """act(x . W^T + bias), with a weight of integers in blocks of 32 outputs: W = integer * scale."""
    rows, columns = np.arange(out_features)[:, None], np.arange(x.shape[-1])
    bytes_ = columns // 2 if weight.dtype == np.uint8 else columns
    integers = weight[rows // 32, bytes_ // interleave, rows % 32, bytes_ % interleave].astype(np.int64)
    if weight.dtype == np.uint8:
        integers = integers >> 4 * (columns % 2) & 15
        integers = np.where(integers < 8, integers, integers - 16)
    groups = columns // (group_size or max(x.shape[-1], 1))
    blocks = np.zeros((scales.shape[0], x.shape[-1], 32, 1))
    blocks[rows // 32, columns, rows % 32, 0] = integers * scales[rows // 32, groups, rows % 32]
    return linear_packed(x, blocks, bias, out_features=out_features, activation=activation)


def fused_mlp(
    x: Array, up_weight: Array, down_weight: Array, gate_weight: Array | None = None, activation: str = "silu"
) -> Answer:
    """act(x . gate^T) * (x . up^T) . down^T, or act(x . up^T) . down^T."""
    act: dict[str, Callable[[Array], Array]] = {
        "silu": _silu,
        "gelu": lambda v: gelu(v).values,
        "relu": lambda v: np.where(v < 0.0, 0.0, v),
    }
    up = linear(x, up_weight)
    # The activations' slopes are below 1.2.
    if gate_weight is None:
        hidden, moved = act[activation](up.values), 1.2 * np.asarray(up.growth)
    else:
        gate = linear(x, gate_weight)
        gated = act[activation](gate.values)
        hidden = gated * up.values
        moved = 1.2 * gate.growth * np.abs(up.values) + np.abs(gated) * up.growth
    out = linear(hidden, down_weight)
    return Answer(out.values, out.growth + (moved + 4.0 * np.abs(hidden)) @ np.abs(down_weight).T)


# --- sampling ---------------------------------------------------------------------------------------------------------


def _softmax(row: Array) -> Array:
    weights = np.exp(row - row.max())
    return np.asarray(weights / weights.sum())


def _pick(weights: Array, u: float) -> tuple[int, float]:
    """The first whose cumulative share exceeds u, and how far u is from a boundary that would decide otherwise."""
    sums = np.cumsum(weights) / weights.sum()
    sums[-1] = max(sums[-1], 1.0)
    inner = sums[:-1][(sums[:-1] > 0.0)]
    return int(np.argmax(sums > u)), float(np.abs(inner - u).min(initial=1.0))


def _by_descending_logit(row: Array) -> Array:
    return np.argsort(-row, kind="stable")


def sample_topk(logits: Array, k: int, uniform: Array) -> tuple[Array, float]:
    """The drawn ids, and the least distance of a uniform number from a boundary."""
    rows, ids, margin = logits.reshape(-1, logits.shape[-1]), [], 1.0
    for row, u in zip(rows, uniform.ravel(), strict=True):
        if np.isnan(row).any():
            ids.append(-1)
            continue
        kept = _by_descending_logit(row)[:k]
        at, far = _pick(_softmax(row[kept]), float(u))
        ids.append(int(kept[at]))
        margin = min(margin, far)
    return np.array(ids, dtype=np.int64).reshape(uniform.shape), margin


def sample_topp(logits: Array, p: float, uniform: Array) -> tuple[Array, float]:
    """Likewise; p keeps its distance from the cumulative probabilities too."""
    rows, ids, margin = logits.reshape(-1, logits.shape[-1]), [], 1.0
    for row, u in zip(rows, uniform.ravel(), strict=True):
        if np.isnan(row).any():
            ids.append(-1)
            continue
        order = _by_descending_logit(row)
        probabilities = _softmax(row)[order]
        sums = np.cumsum(probabilities)
        count = len(sums) if p >= 1.0 else min(int(np.argmax(sums >= p)) + 1, len(sums))
        if p < 1.0:
            margin = min(margin, float(np.abs(sums - p).min()))
        at, far = _pick(probabilities[:count], float(u))
        ids.append(int(order[at]))
        margin = min(margin, far)
    return np.array(ids, dtype=np.int64).reshape(uniform.shape), margin


def speculative_verify(
    draft_ids: Array, draft_probs: Array, target_probs: Array, uniform: Array
) -> tuple[Array, Array, float]:
    """Ids, counts of accepted tokens, and the least distance from a decision's boundary."""
    batch, draft = draft_ids.shape
    ids, accepted, margin = np.full((batch, draft + 1), -1, dtype=np.int64), np.zeros(batch, dtype=np.int64), 1.0
    for b in range(batch):
        last = float(uniform[b, draft])
        weights = target_probs[b, draft]
        for i in range(draft):
            token = int(draft_ids[b, i])
            offered, wanted = float(uniform[b, i]) * draft_probs[b, i, token], target_probs[b, i, token]
            margin = margin if offered == 0.0 else min(margin, abs(offered - wanted))
            if not offered < wanted:
                left = np.maximum(target_probs[b, i] - draft_probs[b, i], 0.0)
                weights = left if left.any() else target_probs[b, i]
                break
            ids[b, i] = token
            accepted[b] += 1
        ids[b, accepted[b]], far = _pick(weights, last)
        # Rows of low-precision probabilities do not sum to one: whether they are normalized must not decide.
        raw = np.cumsum(weights)
        margin = min(margin, far, float(np.abs(raw[:-1] - last).min(initial=1.0)))
        if raw[-1] <= last or int(np.argmax(raw > last)) != ids[b, accepted[b]]:
            margin = 0.0
    return ids, accepted, margin


# --- key/value caches -------------------------------------------------------------------------------------------------


def kv_append(cache: Array, new: Array, slots: Sequence[int], layout: str = "NHD") -> Array:
    """The cache after the call, before rounding to its dtype."""
    after = cache.copy()
    pages = after if layout == "NHD" else after.transpose(0, 2, 1, 3)
    for token, slot in zip(new, slots, strict=True):
        if slot >= 0:
            pages[slot // pages.shape[1], slot % pages.shape[1]] = token
    return after


def kv_compact(cache: Array, moves: Sequence[tuple[int, int]]) -> Array:
    """The cache after the moves; every source as it was before the call."""
    after = cache.copy()
    for source, target in moves:
        after[target] = cache[source]
    return after
