"""Calls at random, on a device, with what they must give. Every call has a seed of its own and can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gpu_references as references
import torch
import torch_references as plain
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
WAYS = ("contiguous", "contiguous", "transposed", "padded", "offset", "stepped", "expanded")


@dataclass(frozen=True)
class Want:
    """One result: its values, the roundoffs it may be off by beyond the tolerance, and whether it must be equal."""

    values: Tensor
    growth: Tensor | float = 0.0
    exact: bool = False


@dataclass(frozen=True)
class Call:
    """A call of a public function. What it must give is `want`, or what the reference on the CPU gives where that is
    `None`; `updated` are the arguments it writes to."""

    function: str
    kwargs: dict[str, Any]
    want: list[Want] | None = None
    updated: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        shown = []
        for name, value in self.kwargs.items():
            if isinstance(value, Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                packed = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
                shown.append(f"{name}: {dtype}{list(value.shape)}{packed}")
            else:
                shown.append(f"{name}={value!r}")
        return f"{self.function}({', '.join(shown)})"


class Draw:
    """The numbers of one call."""

    def __init__(self, seed: int, device: str, ways: bool = False) -> None:
        self.device = device
        self.random = random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._ways = ways
        self.one = self.random.choice

    def floats(self, *shape: int, dtype: torch.dtype, bound: float = 1.5) -> Tensor:
        """Numbers within the bound, lying in memory in any way where that is asked for."""
        uniform = torch.rand(shape, generator=self._generator, device=self.device, dtype=torch.float64)
        drawn = ((2.0 * uniform - 1.0) * bound).to(dtype)
        return self.lay(drawn) if self._ways else drawn

    def weights(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As weights are: sums over them stay of the size of one number."""
        return self.floats(*shape, dtype=dtype, bound=1.5 / shape[-1] ** 0.5)

    def lay(self, values: Tensor) -> Tensor:
        """The same values lying in memory another way; `expanded` repeats the first slice of an axis."""
        way, rank = self.one(WAYS), values.dim()
        if way == "transposed" and rank >= 2:
            a, b = self.random.sample(range(rank), 2)
            return values.transpose(a, b).contiguous().transpose(a, b)
        if way == "padded":
            wide = torch.empty(*values.shape[:-1], values.shape[-1] + 3, dtype=values.dtype, device=values.device)
            return wide[..., 1 : 1 + values.shape[-1]].copy_(values)
        if way == "offset":
            line = torch.empty(values.numel() + 3, dtype=values.dtype, device=values.device)
            return line[1 : 1 + values.numel()].view(values.shape).copy_(values)
        if way == "stepped":
            wide = torch.empty(*values.shape, 2, dtype=values.dtype, device=values.device)
            return wide[..., 1].copy_(values)
        if way == "expanded" and rank >= 1 and values.shape[0] > 1:
            return values[:1].expand(values.shape)
        return values

    def ints(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Given integers, of either width."""
        return torch.as_tensor(values, device=self.device).to(dtype or self.one((torch.int32, torch.int64)))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        kv_heads = self.one((1, 2, 4))
        return kv_heads * self.one((1, 1, 1, 2, 4, 8)), kv_heads


def _lengths(draw: Draw) -> tuple[int, int, int]:
    """Batch, queries and keys: small odd ones, around the tiles of kernels, and as models have them."""
    kind = draw.one(("small", "small", "tiles", "tiles", "decode", "model"))
    if kind == "small":
        seq_q, seq_k = draw.one((1, 2, 3, 7, 17)), draw.one((1, 2, 5, 16, 33))
        return draw.one((1, 2, 3)), seq_q, draw.one((seq_q, seq_k))
    if kind == "tiles":
        seq_q = draw.one((63, 64, 65, 127, 128, 129, 192))
        return draw.one((1, 2)), seq_q, draw.one((seq_q, seq_q, 128, 200, 257))
    if kind == "decode":
        return draw.one((1, 4)), 1, draw.one((2, 100, 512, 1023, 2048))
    seq_q = draw.one((256, 512, 1000))
    return 1, seq_q, draw.one((seq_q, seq_q, 1024))


SCALES = (None, None, None, 0.05, 0.3, -0.4, 0.0)


def attention(draw: Draw) -> Call:
    """Dense attention, causal or under windows, masks, biases."""
    batch, seq_q, seq_k = _lengths(draw)
    (heads, kv_heads), layout = draw.heads(), draw.one(("BSHD", "BHSD"))
    head_dim = draw.one((64, 64, 128, 128, 8, 32, 80, 96, 256, 20, 192, 320))
    dtype = draw.one((*HALVES, *HALVES, torch.float32, torch.float64))
    cross = draw.random.random() < 0.2
    v_dim = draw.one((64, 128)) if draw.random.random() < 0.1 else head_dim
    kwargs: dict[str, Any] = {
        "query": draw.floats(*_order(layout, batch, seq_q, heads, head_dim), dtype=dtype),
        "key": draw.floats(*_order(layout, batch, seq_k, kv_heads, head_dim), dtype=dtype),
        "value": draw.floats(*_order(layout, batch, seq_k, kv_heads, v_dim), dtype=dtype),
        "layout": layout,
        "scale": draw.one(SCALES),
    }
    if not cross:
        kwargs["causal"] = seq_q <= seq_k and draw.one((True, True, False))
        if draw.random.random() < 0.3:
            left, right = draw.one((-1, 0, 3, 64, 300)), draw.one((-1, -1, 0, 2, 40))
            kwargs["window"] = (left, right)
        elif draw.random.random() < 0.15:
            kwargs["alibi_slopes"] = draw.floats(heads, dtype=draw.one((torch.float32, dtype)), bound=0.5).abs()
    if not kwargs.get("causal") and draw.random.random() < 0.4:
        kwargs["attn_mask"] = _mask(draw, (batch, heads, seq_q, seq_k), dtype)
    if draw.random.random() < 0.15:
        kwargs["softcap"] = draw.one((2.0, 30.0))
    function = "cross_attention" if cross else "attention"
    return Call(function, kwargs, [Want(*getattr(references, function)(**kwargs))])


def _order(layout: str, batch: int, sequence: int, heads: int, width: int) -> tuple[int, ...]:
    return (batch, sequence, heads, width) if layout == "BSHD" else (batch, heads, sequence, width)


def _mask(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    sizes = [n if draw.random.random() < 0.6 else 1 for n in shape[:3]]
    lead = sizes if draw.random.random() < 0.7 else sizes[2:]
    allowed = draw.integers(0, 4, *lead, shape[3]) > 0
    if draw.random.random() < 0.5:
        # A query that may attend to nothing.
        allowed.view(-1, shape[3])[0] = False
    if draw.random.random() < 0.5:
        return allowed
    return draw.floats(*allowed.shape, dtype=draw.one((dtype, dtype, torch.float32))).masked_fill(~allowed, -torch.inf)


def _tables(draw: Draw, lengths: list[int], block_size: int, shared: int = 0) -> tuple[Tensor, int]:
    """Page tables, in which pages beyond a context are no page's, and how many pages there are."""
    most = max(1, *(-(-n // block_size) for n in lengths))
    total = most * len(lengths) + 2
    tables = torch.tensor(draw.random.sample(range(total), most * len(lengths))).view(len(lengths), most)
    tables[:, : shared // block_size] = tables[0, : shared // block_size].clone()
    for i, length in enumerate(lengths):
        tables[i, -(-length // block_size) :] = 1 << 20
    return tables, total


def paged(draw: Draw) -> Call:
    """Attention over pages: one query per sequence, or packed ones."""
    batch, (heads, kv_heads), head_dim = draw.one((1, 2, 5)), draw.heads(), draw.one((64, 128, 128, 8, 20, 256))
    block_size, layout = draw.one((16, 16, 1, 32, 256)), draw.one(("NHD", "HND"))
    # What all sequences begin with, in the same pages.
    shared = draw.one((0, 0, 0, 15, 16, 40, 256))
    lengths = [shared + draw.one((0, 1, 15, 16, 33, 270, 600)) for _ in range(batch)]
    dtype = draw.one((*HALVES, *HALVES, torch.float32, torch.float64))
    tables, total = _tables(draw, lengths, block_size, shared)
    slots = (block_size, kv_heads) if layout == "NHD" else (kv_heads, block_size)
    cache = draw.one((dtype, dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    index = draw.one((torch.int32, torch.int32, torch.int64))
    kwargs: dict[str, Any] = {
        "key_cache": draw.floats(total, *slots, head_dim, dtype=torch.float32).to(cache),
        "value_cache": draw.floats(total, *slots, head_dim, dtype=torch.float32).to(cache),
        "block_tables": draw.ints(tables, index),
        "context_lens": draw.ints(lengths, index),
        "layout": layout,
        "scale": draw.one(SCALES),
        "shared_prefix": shared,
    }
    if draw.random.random() < 0.5:
        rows = [draw.one((0, 1, 1, 3, 18, 70)) for _ in range(batch)]
        lead, tail = draw.one((0, 0, 2)), draw.one((0, 0, 3, 1))
        ends = torch.tensor([lead, *rows]).cumsum(0)
        kwargs["query"] = draw.floats(max(int(ends[-1]) + tail, 1), heads, head_dim, dtype=dtype)
        kwargs["cu_seqlens_q"] = draw.ints(ends, index)
        kwargs["causal"] = draw.one((True, True, False))
    else:
        kwargs["query"] = draw.floats(batch, *draw.one(((), (1,))), heads, head_dim, dtype=dtype)
    if draw.random.random() < 0.3:
        kwargs["window"] = draw.one((0, 9, 100))
    if draw.random.random() < 0.2:
        kwargs["softcap"] = draw.one((2.0, 30.0))
    return Call("paged_attention", kwargs, [Want(*references.paged_attention(**kwargs))])


def varlen(draw: Draw) -> Call:
    """Attention within packed sequences: empty ones, more queries than keys, rows of no sequence."""
    (heads, kv_heads), head_dim = draw.heads(), draw.one((64, 128, 128, 8, 80))
    dtype, index = draw.one((*HALVES, torch.float32)), draw.one((torch.int32, torch.int32, torch.int64))
    batch, same = draw.one((1, 2, 5)), draw.random.random() < 0.4
    lengths = [draw.one((0, 1, 7, 64, 130, 300)) for _ in range(batch)]
    counts = lengths if same else [draw.one((0, 1, 1, 3, 18, 70, 200)) for _ in range(batch)]
    lead, tail = draw.one((0, 0, 2)), draw.one((0, 0, 3, 1))
    ends, lasts = torch.tensor([lead, *counts]).cumsum(0), torch.tensor([draw.one((0, 0, 4)), *lengths]).cumsum(0)
    kwargs: dict[str, Any] = {
        "query": draw.floats(max(int(ends[-1]) + tail, 1), heads, head_dim, dtype=dtype),
        "key": draw.floats(max(int(lasts[-1]) + tail, 1), kv_heads, head_dim, dtype=dtype),
        "value": draw.floats(max(int(lasts[-1]) + tail, 1), kv_heads, head_dim, dtype=dtype),
        "cu_seqlens_q": draw.ints(ends, index),
        "cu_seqlens_k": draw.ints(lasts, index),
        "causal": draw.one((True, True, False)),
        "scale": draw.one((None, 0.2)),
    }
    if draw.random.random() < 0.5:
        kwargs |= {"max_seqlen_q": max(counts), "max_seqlen_k": max(lengths) + draw.one((0, 9))}
    if draw.random.random() < 0.3:
        kwargs["window"] = draw.one(((0, -1), (9, -1), (100, 3)))
    if draw.random.random() < 0.2:
        kwargs["softcap"] = draw.one((2.0, 30.0))
    return Call("varlen_attention", kwargs, [Want(*references.varlen_attention(**kwargs))])


def mla(draw: Draw) -> Call:
    """Latent attention: one sequence, packed ones, pages."""
    heads, width, turned = draw.one((1, 4, 16)), *draw.one(((512, 64), (512, 64), (64, 16), (24, 8)))
    dtype = draw.one((*HALVES, torch.float32))
    index = draw.one((torch.int32, torch.int64))
    kwargs: dict[str, Any] = {"scale": draw.one((0.05, 0.1))}
    tokens: tuple[int, ...]
    if draw.random.random() < 0.5:
        batch, block_size = draw.one((1, 3)), draw.one((1, 16, 64))
        lengths = [draw.one((0, 1, 16, 33, 300)) for _ in range(batch)]
        tables, total = _tables(draw, lengths, block_size)
        rows, tokens = batch, (total, block_size)
        kwargs |= {"block_tables": draw.ints(tables, index), "context_lens": draw.ints(lengths, index)}
    else:
        rows, count = draw.one((1, 1, 5, 70)), draw.one((1, 40, 130))
        tokens = (count,) if draw.random.random() < 0.5 else (count, 1)
        kwargs["causal"] = draw.one((True, False))
        if draw.random.random() < 0.5:
            kwargs["qo_indptr"] = draw.ints([0, rows // 2, rows], index)
            kwargs["kv_indptr"] = draw.ints([0, count // 3, count], index)
    kwargs["q_nope"] = draw.floats(rows, heads, width, dtype=dtype)
    kwargs["q_pe"] = draw.floats(rows, heads, turned, dtype=dtype)
    kwargs["ckv"] = draw.floats(*tokens, width, dtype=dtype)
    kwargs["kpe"] = draw.floats(*tokens, turned, dtype=dtype)
    return Call("mla_attention", kwargs, [Want(*references.mla_attention(**kwargs))])


def sparse(draw: Draw) -> Call:
    """Attention within blocks."""
    (heads, kv_heads), head_dim, dtype = draw.heads(), draw.one((64, 128, 8)), draw.one((*HALVES, torch.float32))
    rows, columns = draw.one((1, 3, 6)), draw.one((1, 2, 5))
    kwargs: dict[str, Any] = {"scale": draw.one((None, 0.2))}
    if draw.random.random() < 0.5:
        block_rows, block_cols = draw.one((1, 4, 16, 64)), draw.one((1, 16, 64))
        listed = [[j for j in range(columns) if draw.random.random() < 0.5] for _ in range(rows)]
        ends = torch.tensor([0, *(len(row) for row in listed)]).cumsum(0)
        kwargs |= {"block_rows": block_rows, "block_cols": block_cols, "indptr": draw.ints(ends)}
        kwargs["indices"] = draw.ints([j for row in listed for j in row] or [0], kwargs["indptr"].dtype)
        sizes = (rows * block_rows, heads), (columns * block_cols, kv_heads)
    else:
        row_sizes, column_sizes = (draw.integers(1, 40, kv_heads, n) for n in (rows, columns))
        # Every head has as many positions as the others.
        row_sizes[:, -1] += row_sizes.sum(1).max() - row_sizes.sum(1)
        column_sizes[:, -1] += column_sizes.sum(1).max() - column_sizes.sum(1)
        kwargs |= {"block_mask": draw.integers(0, 2, kv_heads, rows, columns) > 0}
        kwargs |= {"block_row_sizes": row_sizes.int(), "block_col_sizes": column_sizes.int(), "layout": "HND"}
        sizes = (heads, int(row_sizes[0].sum())), (kv_heads, int(column_sizes[0].sum()))
    kwargs["query"] = draw.floats(*sizes[0], head_dim, dtype=dtype)
    kwargs["key"], kwargs["value"] = (draw.floats(*sizes[1], head_dim, dtype=dtype) for _ in range(2))
    return Call("sparse_attention", kwargs, [Want(*references.sparse_attention(**kwargs))])


def wide(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with all floats in float64."""
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}


def by_plain(function: str, kwargs: dict[str, Any], growth: Tensor | float = 0.0) -> Call:
    """A call whose result the compositions of plain torch give."""
    device = next(v for v in kwargs.values() if isinstance(v, Tensor)).device
    with torch.device(device):
        got = getattr(plain, function)(**wide(kwargs))
    results = got if isinstance(got, tuple) else (got,)
    return Call(function, kwargs, [Want(result, growth) for result in results])


FAMILIES: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "attention": (attention, 800),
    "varlen": (varlen, 260),
    "paged": (paged, 260),
    "mla": (mla, 120),
    "sparse": (sparse, 120),
}
"""How calls are drawn, and how many of them."""
