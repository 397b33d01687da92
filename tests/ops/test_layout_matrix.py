"""No wrong answer for any head count, length and stride pattern: every function with layouts, against float64.

Heads 1 to 40, lengths 1 to 140, contiguous and transposed, one key/value head per query head and shared ones. The quick
size draws from this space; the full size walks all of it.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from numpy.typing import NDArray
from torch import Tensor

FULL = os.environ.get("LZ_TEST_SCALE") == "full"
HEADS, LENGTHS = range(1, 41), range(1, 141)
DRAWN = 30
"""Cases per function at the quick size, besides the corners."""
DIM = 4

Array = NDArray[np.float64]
Case = tuple[int, int, int, str]
"""Heads, how many of them share a key/value head, length, how the tensors lie in memory."""


#: Heads that are tried in one test: the whole matrix is split, so that it can be run on many cores.
PARTS = [range(first, first + 4) for first in range(1, 41, 4)] if FULL else [HEADS]


def cases(function: str, part: range) -> Iterator[Case]:
    """All of them, or a sample that is the same every time."""

    def groups(heads: int) -> list[int]:
        return [n for n in (1, 2, 4, heads) if heads % n == 0]

    ways = ("contiguous", "transposed")
    if FULL:
        for heads, length, way in itertools.product(part, LENGTHS, ways):
            yield from ((heads, group, length, way) for group in sorted(set(groups(heads))))
        return
    drawn = random.Random(function)
    corners = [1, 2, 7, 8, 12, 32, 40] if function == "attention" else [1, 2, 8, 12]
    pairs = [*itertools.product(corners, corners)]
    pairs += [(drawn.choice(HEADS), drawn.choice(LENGTHS)) for _ in range(DRAWN)]
    for heads, length in pairs:
        yield heads, drawn.choice(groups(heads)), length, drawn.choice(ways)


class Draws:
    """Small numbers, laid out in memory one way or the other."""

    def __init__(self, case: Case) -> None:
        self.rng = np.random.default_rng(case[:3])
        self.way = case[3]

    def __call__(self, *shape: int, swap: tuple[int, int] = (1, 2)) -> Tensor:
        tensor = torch.from_numpy(self.rng.uniform(-1.0, 1.0, shape))
        if self.way == "transposed":
            return tensor.transpose(*swap).contiguous().transpose(*swap)
        return tensor


def attention(case: Case) -> None:
    heads, group, length, _ = case
    draw = Draws(case)
    q, k, v = draw(1, length, heads, DIM), draw(1, length, heads // group, DIM), draw(1, length, heads // group, DIM)
    want = attended(*arrays(q, k, v), causal=True)
    same(lz.attention(q, k, v), want)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    with lz.layout("BHSD"):
        same(lz.attention(*turned).transpose(1, 2), want)
    out = lz.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    same(out.transpose(1, 2), want)


def cross_attention(case: Case) -> None:
    heads, group, length, _ = case
    draw = Draws(case)
    q, k, v = draw(1, 3, heads, DIM), draw(1, length, heads // group, DIM), draw(1, length, heads // group, DIM)
    want = attended(*arrays(q, k, v), causal=False)
    same(lz.cross_attention(q, k, v), want)
    with lz.layout("BHSD"):
        same(lz.cross_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), want)


def decode(case: Case) -> None:
    heads, group, length, _ = case
    draw = Draws(case)
    q, k, v = draw(2, 1, heads, DIM), draw(2, length, heads // group, DIM), draw(2, length, heads // group, DIM)
    want = attended(*arrays(q, k, v), causal=True)
    same(lz.attention(q, k, v), want)
    with lz.layout("BHSD"):
        same(lz.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), want)


def rope(case: Case) -> None:
    heads, _, length, _ = case
    draw = Draws(case)
    x, cos, sin = draw(2, length, heads, DIM), draw(length, 2, swap=(0, 1)), draw(length, 2, swap=(0, 1))
    want = rotated(x, cos, sin)
    same(lz.rope(x, cos, sin), want)
    same(lz.rope(x[0], cos, sin), want[0])
    with lz.layout("BHSD"):
        same(lz.rope(x.transpose(1, 2), cos, sin).transpose(1, 2), want)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Array:
    first, second = x.numpy()[..., : DIM // 2], x.numpy()[..., DIM // 2 :]
    c, s = cos.numpy()[None, :, None], sin.numpy()[None, :, None]
    return np.concatenate([first * c - second * s, second * c + first * s], -1)


def paged(case: Case) -> None:
    heads, group, length, _ = case
    draw = Draws(case)
    slots = draw.rng.choice([1, 4, heads // group, 16])
    pages = -(-length // int(slots))
    kv_heads = heads // group
    keys, values = draw(1, length, kv_heads, DIM), draw(1, length, kv_heads, DIM)
    query = draw(1, 1, heads, DIM)
    want = attended(*arrays(query, keys, values), causal=True)[:, 0]
    place = torch.from_numpy(draw.rng.permutation(pages).astype(np.int64))
    at = place[torch.arange(length) // slots] * slots + torch.arange(length) % slots
    for name in ("NHD", "HND"):
        nhd = [draw(pages, int(slots), kv_heads, DIM) for _ in range(2)]
        caches = nhd if name == "NHD" else [c.transpose(1, 2).contiguous() for c in nhd]
        with lz.layout(name):
            lz.kv_append(keys[0], values[0], *caches, at)
            out = lz.paged_attention(query[:, 0], *caches, place[None].int(), torch.tensor([length]))
            move = torch.tensor([[0, pages - 1]])
            expected = [c.clone() for c in caches]
            for cache in expected:
                cache[pages - 1] = cache[0]
            lz.kv_compact(*caches, move)
        same(out, want)
        assert all(torch.equal(one, other) for one, other in zip(caches, expected, strict=True))


def mla(case: Case) -> None:
    heads, _, length, _ = case
    draw = Draws(case)
    nope, pe = draw(length, heads, DIM, swap=(0, 1)), draw(length, heads, 2, swap=(0, 1))
    ckv, kpe = draw(length, DIM, swap=(0, 1)), draw(length, 2, swap=(0, 1))
    q = np.concatenate([nope.numpy(), pe.numpy()], -1)[None]
    k = np.concatenate([ckv.numpy(), kpe.numpy()], -1)[None, :, None]
    want = attended(q, k, ckv.numpy()[None, :, None], causal=True, scale=0.5)[0]
    same(lz.mla_attention(nope, pe, ckv, kpe, 0.5), want)


def sparse(case: Case) -> None:
    heads, group, length, _ = case
    draw = Draws(case)
    q, k, v = (draw(length, n, DIM, swap=(0, 1)) for n in (heads, heads // group, heads // group))
    want = attended(*(t.numpy()[None] for t in (q, k, v)), causal=False)[0]
    whole = {"indptr": torch.tensor([0, 1]), "indices": torch.tensor([0]), "block_rows": length, "block_cols": length}
    same(lz.sparse_attention(q, k, v, **whole), want)
    kv = heads // group
    blocks = {
        "block_mask": torch.ones(kv, 1, 1, dtype=torch.bool),
        "block_row_sizes": torch.full((kv, 1), length),
        "block_col_sizes": torch.full((kv, 1), length),
    }
    same(lz.sparse_attention(*(t.transpose(0, 1) for t in (q, k, v)), **blocks).transpose(0, 1), want)
    same(lz.sparse_attention(q, k, v, **blocks, layout="NHD"), want)


def attended(q: Array, k: Array, v: Array, causal: bool, scale: float | None = None) -> Array:
    """Attention by its definition, in the order batch, sequence, heads, element; the last query is aligned with the last key. All
    heads at once: the whole matrix has 200,000 cases. `reference.attention`, query by query, says the same (below)."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = np.arange(k.shape[1])[None] <= np.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def arrays(*tensors: Tensor) -> list[Array]:
    return [np.ascontiguousarray(t.numpy()) for t in tensors]


def same(out: Tensor, want: Array) -> None:
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-9, atol=1e-9)


FUNCTIONS = [attention, decode, cross_attention, rope, paged, mla, sparse]


@pytest.mark.parametrize(("seq_q", "seq_k", "causal"), [(7, 7, True), (3, 9, True), (1, 5, True), (4, 6, False)])
def test_the_reference_of_all_heads_at_once_is_the_other_one(seq_q: int, seq_k: int, causal: bool) -> None:
    draw = Draws((6, 3, seq_k, "contiguous"))
    q, k, v = arrays(draw(2, seq_q, 6, DIM), draw(2, seq_k, 2, DIM), draw(2, seq_k, 2, DIM))
    expected = reference.attention(q, k, v, causal=causal, scale=0.3).values
    np.testing.assert_allclose(attended(q, k, v, causal, 0.3), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.start}-{part.stop - 1}")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_size_and_no_stride_gives_a_wrong_answer(function: Callable[[Case], None], part: range) -> None:
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lz.LayerZeroWarning)
        for case in cases(function.__name__, part):
            try:
                function(case)
            except Exception as error:
                raise AssertionError(f"heads, group, length, strides = {case}") from error
            count += 1
    assert count >= DRAWN
