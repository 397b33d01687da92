"""The kernels, and the map from their ids to functions.

A kernel function names the arguments it uses, after the operation's schema (`layerzero ops attention.gqa.prefill` prints
it), in any order. It is called with them by position. Whatever `capabilities.json` does not mention is never asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

CHUNK = 256
"""Queries, and keys, looked at together: the scores of one such square are all that is ever held."""

BLOCK_BYTES = 1 << 19
"""What a block of rows takes in float32: about half of a core's second-level cache."""


def detect() -> str:
    """The version that is installed."""
    return version("lz-example-plugin")


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Attention with softcap and linear biases, a square of queries and keys at a time.

    Memory does not grow with queries times keys, and squares nobody may look at are skipped.
    """
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, heads, seq_q, head_dim = query.shape
    seq_k, v_dim = key.shape[2], value.shape[3]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    keys, values = key.to(work), value.to(work)
    slopes = None if alibi_slopes is None else alibi_slopes.to(work)[:, None, None]
    # The result is laid out as the caller's tensors are.
    shape = (batch, seq_q, heads, v_dim) if layout == "BSHD" else (batch, heads, seq_q, v_dim)
    result = query.new_empty(shape)
    output = result.transpose(1, 2) if layout == "BSHD" else result
    window = (window_left, 0 if causal else window_right)
    for start in range(0, seq_q, CHUNK):
        block = query[:, :, start : start + CHUNK].to(work) * scale
        # The last query stands at the last key.
        position = torch.arange(start, start + block.shape[2]) + (seq_k - seq_q)
        output[:, :, start : start + CHUNK] = _attend(block, position, keys, values, slopes, window, softcap)
    return result


def _attend(
    query: Tensor,
    position: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """A block of queries over all keys. Sums so far are rescaled whenever a query meets a larger score."""
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_k, v_dim = key.shape[1], key.shape[2], value.shape[3]
    # Queries that share a key/value head are rows of one product.
    rows = heads // kv_heads * seq_q
    queries = query.reshape(batch, kv_heads, rows, head_dim)
    highest = queries.new_full((batch, kv_heads, rows, 1), -math.inf)
    total = queries.new_zeros(batch, kv_heads, rows, 1)
    output = queries.new_zeros(batch, kv_heads, rows, v_dim)
    left, right = window
    first = 0 if left < 0 else max(0, int(position[0]) - left)
    end = seq_k if right < 0 else min(seq_k, int(position[-1]) + right + 1)
    for start in range(first, end, CHUNK):
        stop = min(start + CHUNK, end)
        scores = torch.matmul(queries, key[:, :, start:stop].transpose(2, 3)).view(batch, heads, seq_q, stop - start)
        if softcap > 0.0:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        distance = position[:, None] - torch.arange(start, stop)
        if slopes is not None:
            scores.sub_(slopes * distance.abs())
        hidden = _hidden(distance, left, right)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        scores = scores.view(batch, kv_heads, rows, stop - start)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A row that has met no key yet is compared with 0: its weights are exp(-inf), which is what they should be.
        level = higher.masked_fill(higher == -math.inf, 0.0)
        weights = scores.sub_(level).exp_()
        decay = highest.sub_(level).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        output.mul_(decay).add_(_weighted(weights, value[:, :, start:stop], hidden, heads))
        highest = higher
    # A query that attended to nothing gives zeros.
    output.div_(total.masked_fill_(total == 0.0, 1.0))
    return output.view(batch, heads, seq_q, v_dim)


def _hidden(distance: Tensor, left: int, right: int) -> Tensor | None:
    """Where a key is further away than a query may look, or `None` where none is."""
    hidden = None
    if right >= 0 and bool((distance < -right).any()):
        hidden = distance < -right
    if left >= 0 and bool((distance > left).any()):
        hidden = distance > left if hidden is None else hidden | (distance > left)
    return hidden


def _weighted(weights: Tensor, values: Tensor, hidden: Tensor | None, heads: int) -> Tensor:
    """`weights @ values`, where a hidden value counts for nothing, not even one that is no number."""
    if hidden is None or bool(values.isfinite().all()):
        return torch.matmul(weights, values)
    batch, kv_heads, rows, count = weights.shape
    hidden = hidden.repeat(heads // kv_heads, 1).view(rows, count)
    output = weights.new_zeros(batch, kv_heads, rows, values.shape[3])
    for i in range(count):
        part = weights[..., i : i + 1] * values[:, :, i : i + 1]
        output.add_(part.masked_fill_(hidden[:, i : i + 1], 0.0))
    return output


def blocked_rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm in float32, a block of rows at a time: what is read stays in the cache until it is written."""
    hidden = input.shape[-1]
    flat = input.view(-1, hidden)
    output = torch.empty_like(flat)
    weight = None if weight is None else weight.float()
    step = max(1, BLOCK_BYTES // (4 * hidden))
    for start in range(0, flat.shape[0], step):
        block = flat[start : start + step].float()
        size = torch.linalg.vector_norm(block, 2, -1, True)
        block = block * size.square_().div_(hidden).add_(eps).rsqrt_()
        if weight is not None:
            block.mul_(weight)
        output[start : start + step] = block
    return output.view(input.shape)


KERNELS: dict[str, Callable[..., Any]] = {
    "lz_example.attention.chunked": chunked_attention,
    "lz_example.rms_norm.blocked": blocked_rms_norm,
}
