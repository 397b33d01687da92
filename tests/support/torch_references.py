# mypy: allow-untyped-calls
"""What every operation gives, as compositions of plain torch: written from the operations' definitions alone.

They compute in the dtype they are given, float64 in the tests, and can be differentiated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, may: Tensor, bias: Any = 0.0) -> Tensor:
    """Heads first: (..., heads, seq, dim). `may` tells where a query may attend; one that may nowhere gives zeros."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale) + bias
    weights = torch.softmax(scores.masked_fill(~may, -torch.inf), -1).masked_fill(~may, 0.0).nan_to_num(0.0)
    return weights @ value


def _distance(seq_q: int, seq_k: int) -> Tensor:
    """Key position less query position, queries being the last ones."""
    return torch.arange(seq_k)[None, :] - (torch.arange(seq_q)[:, None] + seq_k - seq_q)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: Any = None,
    softcap: float = 0.0,
    layout: str = "BSHD",
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense attention."""
    if layout == "BSHD":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        options: dict[str, Any] = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "softcap": softcap}
        options["sinks"] = sinks
        return attention(query, key, value, causal, scale, window=window, layout="BHSD", **options).transpose(1, 2)
    distance = _distance(query.shape[2], key.shape[2])
    left, right = (-1, -1) if window is None else (window, -1) if isinstance(window, int) else window
    may = torch.ones_like(distance, dtype=torch.bool)
    may &= distance <= 0 if causal else may
    may &= distance >= -left if left >= 0 else may
    may &= distance <= right if right >= 0 else may
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias: Any = 0.0
    if alibi_slopes is not None:
        bias = -alibi_slopes[:, None, None] * distance.abs()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        may = may & attn_mask
    elif attn_mask is not None:
        bias = bias + attn_mask
    if softcap:
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scale
        bias = bias + softcap * torch.tanh(scores / softcap) - scores
    if sinks is not None:
        # A key and a value of zeros more for each head, whose score is the sink.
        group = query.shape[1] // key.shape[1]
        key, value = (torch.nn.functional.pad(t.repeat_interleave(group, 1), (0, 0, 0, 1)) for t in (key, value))
        scores = sinks[:, None, None].expand(*query.shape[:3], 1)
        bias = torch.cat((torch.zeros(*query.shape[:3], key.shape[2] - 1) + bias, scores), -1)
        may = torch.nn.functional.pad(may, (0, 1), value=True)
    return _attend(query, key, value, scale, may, bias)


def attention_lse(
    query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Dense attention, sequence first, and the logarithms of the softmaxes' sums."""
    group = query.shape[2] // key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key.repeat_interleave(group, 2)) * scale
    if causal:
        scores = scores.masked_fill((_distance(query.shape[1], key.shape[1]) > 0)[:, None], -torch.inf)
    return attention(query, key, value, causal, scale, **options), scores.logsumexp(-1).float()


def varlen_attention_lse(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, ...]:
    """Attention within packed sequences that own every row, with logarithms."""
    starts, firsts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    each = []
    for i in range(len(starts) - 1):
        own, keys = slice(starts[i], starts[i + 1]), slice(firsts[i], firsts[i + 1])
        each.append(attention_lse(query[own][None], key[keys][None], value[keys][None]))
    return tuple(torch.cat([part[i][0] for part in each]) for i in range(2))


def paged_attention_lse(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> tuple[Tensor, ...]:
    """Attention of one query per sequence over pages, with logarithms."""
    each = []
    for i, length in enumerate(context_lens.tolist()):
        keys, values = (
            cache[block_tables[i].long()].flatten(0, 1)[:length][None] for cache in (key_cache, value_cache)
        )
        each.append(attention_lse(query[i : i + 1][None], keys, values))
    return tuple(torch.cat([part[i][0] for part in each]) for i in range(2))


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two results as one."""
    both = torch.stack((lse_a, lse_b))
    weights = both.softmax(0).to(out_a.dtype)[..., None]
    return weights[0] * out_a + weights[1] * out_b, both.logsumexp(0)


def cross_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **options: Any) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, False, scale, **options)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention over pages of slots, (slot, head, dim) each."""
    starts = list(range(len(context_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    rows = []
    for i, length in enumerate(context_lens.tolist()):
        keys, values = (
            cache[block_tables[i].long()].flatten(0, 1)[:length].transpose(0, 1) for cache in (key_cache, value_cache)
        )
        own = query[starts[i] : starts[i + 1]].transpose(0, 1)
        distance = _distance(own.shape[1], length)
        may = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        rows.append(_attend(own, keys, values, scale, may).transpose(0, 1))
    return torch.cat(rows)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention within packed sequences that own every row, each as dense attention."""
    rows = []
    starts, firsts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        own = query[starts[i] : starts[i + 1]][None]
        keys, values = (t[firsts[i] : firsts[i + 1]][None] for t in (key, value))
        rows.append(attention(own, keys, values, causal, scale, softcap=softcap)[0])
    return torch.cat(rows)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    scale: float,
    *,
    causal: bool = True,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    qo_indptr: Tensor | None = None,
) -> Tensor:
    """Latent attention of one sequence, or of one query or several each over pages."""
    if block_tables is not None and context_lens is not None:
        rows = []
        starts = list(range(len(context_lens) + 1)) if qo_indptr is None else qo_indptr.tolist()
        for i, length in enumerate(context_lens.tolist()):
            own = [cache[block_tables[i].long()].flatten(0, 1)[:length] for cache in (ckv, kpe)]
            part = slice(starts[i], starts[i + 1])
            rows.append(mla_attention(q_nope[part], q_pe[part], own[0], own[1], scale, causal=causal))
        return torch.cat(rows)
    ckv, kpe = ckv.reshape(-1, ckv.shape[-1]), kpe.reshape(-1, kpe.shape[-1])
    query = torch.cat([q_nope, q_pe], -1).transpose(0, 1)
    distance = _distance(len(q_nope), len(ckv))
    may = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return _attend(query, torch.cat([ckv, kpe], -1)[None], ckv[None], scale, may).transpose(0, 1)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    block_rows: int = 1,
    block_cols: int = 1,
    block_mask: Tensor | None = None,
    block_row_sizes: Tensor | None = None,
    block_col_sizes: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention within blocks: compressed rows of one size (tokens first), or a mask of many sizes (heads first)."""
    if indptr is not None and indices is not None:
        may = torch.zeros(len(query), len(key), dtype=torch.bool)
        for i in range(len(indptr) - 1):
            for j in indices[indptr[i] : indptr[i + 1]].tolist():
                may[i * block_rows : (i + 1) * block_rows, j * block_cols : (j + 1) * block_cols] = True
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        return _attend(query, key, value, scale, may).transpose(0, 1)
    assert block_mask is not None and block_row_sizes is not None and block_col_sizes is not None
    per_head = [
        mask.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        for mask, rows, cols in zip(block_mask, block_row_sizes.long(), block_col_sizes.long(), strict=True)
    ]
    group = query.shape[0] // key.shape[0]
    return _attend(query, key, value, scale, torch.stack(per_head).repeat_interleave(group, 0))


def rope(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    *,
    positions: Tensor | None = None,
    layout: str = "BSHD",
) -> Tensor:
    """Rotary embedding; one column of the tables per rotated pair."""
    if layout == "BHSD":
        return rope(input.transpose(1, 2), cos, sin, interleaved, positions=positions).transpose(1, 2)
    at = torch.arange(input.shape[1]) if positions is None else positions.long()
    cos, sin = (table[at][..., None, :] for table in (cos, sin))
    rot = cos.shape[-1]
    turned, rest = input[..., : 2 * rot], input[..., 2 * rot :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :rot], turned[..., rot:])
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([turned, rest], -1)


def alibi_bias(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """Linear position bias."""
    return -slopes[:, None, None] * _distance(seq_q, seq_k).abs()


def rms_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm."""
    normed = input / torch.sqrt(input.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def layer_norm(
    input: Tensor,
    normalized_shape: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm."""
    axes = [-1] if normalized_shape is None or isinstance(normalized_shape, int) else range(-len(normalized_shape), 0)
    mean = input.mean(tuple(axes), keepdim=True)
    normed = (input - mean) / torch.sqrt((input - mean).square().mean(tuple(axes), keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Any:
    """Residual addition and norm."""
    return rms_norm(input + residual, weight, eps), input + residual


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Matrix product."""
    product = input @ weight.T
    return product if bias is None else product + bias


def linear_packed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
    interleave: int = 1,
    activation: str = "none",
) -> Tensor:
    """Matrix product with a weight in blocks of 32 outputs, and an activation."""
    plain = weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * 32, weight.shape[1] * interleave)
    out = linear(input, plain[:out_features, : input.shape[-1]], bias)
    return out * torch.sigmoid(out) if activation == "silu" else out


def linear_quantized(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor,
    out_features: int,
    interleave: int = 1,
    activation: str = "none",
) -> Tensor:
    """The same with a weight of integers, and a scale for each output."""
    plain = weight.to(input.dtype) * scales.to(input.dtype)[:, :, :, None]
    return linear_packed(input, plain, bias, out_features=out_features, interleave=interleave, activation=activation)


def fused_mlp(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """Feed-forward block."""
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x * torch.sigmoid(x),
        "gelu": gelu,
        "relu": lambda x: x.clamp(min=0),
    }
    act = activations[activation]
    up = input @ up_weight.T
    hidden = act(up) if gate_weight is None else act(input @ gate_weight.T) * up
    return hidden @ down_weight.T


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gated SiLU."""
    return gate * torch.sigmoid(gate) * up


def softmax(input: Tensor) -> Tensor:
    """Shares of each row, by the definition."""
    weights = (input - input.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit."""
    if approximate == "tanh":
        return input / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (input + 0.044715 * input**3)))
    return input / 2 * (1 + torch.erf(input / 2**0.5))


def _first_beyond(probabilities: Tensor, uniform: Tensor) -> Tensor:
    return (probabilities.cumsum(-1) > uniform[..., None]).to(torch.uint8).argmax(-1)


def sample_topk(logits: Tensor, k: int, *, uniform: Tensor) -> Tensor:
    """Top-k sampling with given numbers."""
    kept, ids = logits.sort(dim=-1, descending=True, stable=True)
    place = _first_beyond(torch.softmax(kept[..., :k], -1), uniform)
    return ids.gather(-1, place[..., None])[..., 0]


def sample_topp(logits: Tensor, p: float, *, uniform: Tensor) -> Tensor:
    """Nucleus sampling with given numbers."""
    kept, ids = torch.softmax(logits, -1).sort(dim=-1, descending=True, stable=True)
    kept = kept.masked_fill(kept.cumsum(-1) - kept >= p, 0.0)
    place = _first_beyond(kept / kept.sum(-1, keepdim=True), uniform)
    return ids.gather(-1, place[..., None])[..., 0]


def speculative_verify(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, *, uniform: Tensor) -> Any:
    """Speculative verification with given numbers."""
    batch, draft = draft_ids.shape
    ids, accepted = torch.full((batch, draft + 1), -1), torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        step = 0
        while step < draft and (
            uniform[b, step] * draft_probs[b, step, draft_ids[b, step]] < target_probs[b, step, draft_ids[b, step]]
        ):
            ids[b, step] = draft_ids[b, step]
            step += 1
        rest = target_probs[b, step]
        if step < draft and (rest > draft_probs[b, step]).any():
            rest = (rest - draft_probs[b, step]).clamp(min=0)
        ids[b, step] = _first_beyond(rest / rest.sum(), uniform[b, draft])
        accepted[b] = step
    return ids, accepted


def quantize_int8(
    input: Tensor, dtype: Any, scale: Tensor | None = None, *, granularity: str = "per_tensor", group_size: int = 32
) -> Any:
    """8-bit integers, without a zero point."""
    rows = input.reshape(-1, input.shape[-1])
    groups = {
        "per_tensor": lambda: rows.reshape(1, 1, -1),
        "per_channel": lambda: rows[:, None],
        "blockwise": lambda: rows.reshape(len(rows), -1, group_size),
    }[granularity]()
    scales = (groups.abs().amax(-1) / 127).float() if scale is None else scale.float().reshape(groups.shape[:2])
    values = torch.round(groups / scales.double()[..., None]).clamp(-128, 127).to(torch.int8).reshape(input.shape)
    return values if scale is not None else (values, scales, torch.zeros_like(scales, dtype=torch.int32))


def dequantize(values: Tensor, scales: Tensor, zero_points: Tensor | None = None, **_: Any) -> Tensor:
    """Back to floats, one scale per row."""
    shifted = values.double() if zero_points is None else values.double() - zero_points.double().reshape(-1, 1)
    return shifted * scales.reshape(-1, 1)


def kv_append(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> Any:
    """The caches after writing."""
    caches = [key_cache.clone(), value_cache.clone()]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for cache, new in zip(caches, (key, value), strict=True):
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[t]
    return tuple(caches)


def kv_compact(key_cache: Tensor, value_cache: Tensor, moves: Tensor) -> Any:
    """The caches after moving pages."""
    caches = [key_cache.clone(), value_cache.clone()]
    for source, target in moves.tolist():
        caches[0][target], caches[1][target] = key_cache[source], value_cache[source]
    return tuple(caches)
