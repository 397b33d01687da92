"""Latent attention by matrix products: scores are the sum of a latent and a positional product, values the latent part.

Nothing waits for the device: packed sequences are one product under a mask, pages are gathered whole.
"""

import torch
from torch import Tensor

from .paged import Contexts
from .unfused import product, stays_narrow

_safe_softmax = torch._C._VariableFunctions._safe_softmax
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _dtype(query: Tensor, latents: Tensor) -> torch.dtype:
    return query.dtype if latents.dtype in _FLOAT8 else torch.promote_types(query.dtype, latents.dtype)


def _attend(
    q_nope: Tensor, q_pe: Tensor, latent: Tensor, positional: Tensor, scale: float, allowed: Tensor | None
) -> Tensor:
    """Batches of rows over batches of latent vectors; `allowed` broadcasts to batch, rows, latent vectors."""
    dtype = latent.dtype
    q_nope, q_pe = q_nope.to(dtype), q_pe.to(dtype)
    narrow = stays_narrow(q_nope, q_pe, latent, positional) and latent.numel() > 0 and q_pe.numel() > 0
    scores = product(q_nope, latent.transpose(1, 2), narrow)
    scores = scores.add_(product(q_pe, positional.transpose(1, 2), narrow)).mul_(scale)
    if allowed is not None:
        scores = scores.masked_fill_(~allowed, -torch.inf)
    weights = _safe_softmax(scores, -1)
    if narrow:
        return torch.bmm(weights.to(dtype), latent)
    return torch.bmm(weights, latent.to(weights.dtype)).to(dtype)


def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """Over contiguous latent vectors, of one sequence or of packed ones."""
    dtype = _dtype(q_nope, ckv)
    latent = ckv.reshape(1, ckv.shape[0], ckv.shape[-1]).to(dtype)
    positional = kpe.reshape(1, kpe.shape[0], kpe.shape[-1]).to(dtype)
    seq_q, heads, seq_k = q_nope.shape[0], q_nope.shape[1], ckv.shape[0]
    allowed = _reachable(seq_q, seq_k, qo_indptr, kv_indptr, causal, q_nope.device)
    if allowed is not None:
        # All heads share the one latent head: they are further rows.
        allowed = allowed[:, None].expand(seq_q, heads, seq_k).reshape(1, seq_q * heads, seq_k)
    output = _attend(q_nope.reshape(1, -1, q_nope.shape[2]), q_pe.reshape(1, -1, q_pe.shape[2]), latent, positional,
                     scale, allowed)  # fmt: skip
    return output.view(seq_q, heads, ckv.shape[-1]).to(q_nope.dtype)


def _reachable(
    seq_q: int, seq_k: int, qo_indptr: Tensor | None, kv_indptr: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Which latent vectors a query reaches, or `None` for all: those of its sequence, up to its position."""
    if qo_indptr is None or kv_indptr is None:
        if not causal or (seq_q == 1 and seq_k > 0):
            return None
        return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device).tril_(seq_k - seq_q)
    of_row, row = _within(qo_indptr, seq_q)
    of_token, token = _within(kv_indptr, seq_k)
    same = (of_row[:, None] == of_token) & (of_row >= 0)[:, None]
    # Both are counted from the end of the sequence.
    return same & (token <= row[:, None]) if causal else same


def _within(indptr: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sequence each of `count` places lies in, -1 for those in none, and where in it, counted from its end."""
    indptr = indptr.long().contiguous()
    place = torch.arange(count, device=indptr.device)
    sequence = torch.searchsorted(indptr, place, right=True) - 1
    last = indptr.shape[0] - 2
    outside = (sequence < 0) | (sequence > last)
    sequence = sequence.clamp_(0, max(last, 0))
    end = indptr[1:].index_select(0, sequence) if last >= 0 else torch.zeros_like(place)
    return sequence.masked_fill(outside, -1), place - end


def mla_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """One query per sequence over a paged cache."""
    dtype = _dtype(q_nope, ckv_cache)
    contexts = Contexts(block_tables, context_lens, ckv_cache.shape[1])
    latent, positional = contexts.read(ckv_cache, dtype), contexts.read(kpe_cache, dtype)
    output = _attend(q_nope, q_pe, latent, positional, scale, contexts.is_there[:, None])
    return contexts.nothing_is_zero(output).to(q_nope.dtype)


def mla_paged_packed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    qo_indptr: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Several queries per sequence over a paged cache: all rows with each sequence, under a mask."""
    dtype = _dtype(q_nope, ckv_cache)
    contexts = Contexts(block_tables, context_lens, ckv_cache.shape[1])
    latent, positional = contexts.read(ckv_cache, dtype), contexts.read(kpe_cache, dtype)
    rows, heads = q_nope.shape[:2]
    # All heads share the one latent head.
    queries = q_nope.flatten(0, 1)[None], q_pe.flatten(0, 1)[None]
    row, ends = torch.arange(rows, device=q_nope.device)[:, None], qo_indptr.long()
    output = torch.zeros(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    for sequence in range(context_lens.shape[0]):
        own = (row >= ends[sequence]) & (row < ends[sequence + 1]) & (contexts.lengths[sequence] > 0)
        reached = own & contexts.is_there[sequence]
        if causal:
            # The rows of a sequence are its last positions.
            reached &= contexts.positions <= row - ends[sequence + 1] + contexts.lengths[sequence]
        allowed = reached.repeat_interleave(heads, 0)[None]
        own_keys = slice(sequence, sequence + 1)
        attended = _attend(*queries, latent[own_keys], positional[own_keys], scale, allowed)
        output = torch.where(own[:, :, None], attended.view(q_nope.shape).to(q_nope.dtype), output)
    return output
