"""Calls of attention: drawn at random, put to the engine, run by an adapter, and what they must give."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import reference
import torch
from adapter_cases import DTYPES, TOLERANCES
from described import ask
from torch import Tensor

Attend = Callable[..., Any]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Attention in float64 of [..., heads, queries, element] over as many or fewer key/value heads; `allowed` and `bias`
    broadcast to the scores. A query that may attend to nothing gives zeros."""
    k, v = (t.double().repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = scale * (q.double() @ k.transpose(-1, -2))
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0) if allowed is not None else torch.softmax(scores, -1)
    return (weights if kept is None else weights * kept) @ v


def positions(seq_q: int, seq_k: int, device: Any = None) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand, aligned bottom-right."""
    return torch.arange(seq_k - seq_q, seq_k, device=device)[:, None], torch.arange(seq_k, device=device)[None]


def reach(seq_q: int, seq_k: int, causal: bool, left: int, right: int, device: Any = None) -> Tensor:
    """What the contract lets a query see by position."""
    query, key = positions(seq_q, seq_k, device)
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    if causal:
        allowed &= key <= query
    if left >= 0:
        allowed &= key >= query - left
    if right >= 0:
        allowed &= key <= query + right
    return allowed


@dataclass(frozen=True)
class Dense:
    """A call of dense attention."""

    batch: int = 2
    seq_q: int = 24
    seq_k: int = 24
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    v_dim: int = 64
    dtype: str = "float16"
    layout: str = "BSHD"
    causal: bool = True
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi: bool = False
    mask: str | None = None
    cross: bool = False

    def shape(self, sequence: int, heads: int, width: int) -> tuple[int, ...]:
        """A shape in the call's layout."""
        order = (sequence, heads) if self.layout == "BSHD" else (heads, sequence)
        return (self.batch, *order, width)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        found = {
            "query": self.shape(self.seq_q, self.heads, self.head_dim),
            "key": self.shape(self.seq_k, self.kv_heads, self.head_dim),
            "value": self.shape(self.seq_k, self.kv_heads, self.v_dim),
        }
        if self.alibi:
            found["alibi_slopes"] = (self.heads,)
        if self.mask is not None:
            found["attn_mask"] = (self.batch, 1, self.seq_q, self.seq_k)
        return found

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters that are not at their defaults."""
        given: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        if self.softcap:
            given["softcap"] = self.softcap
        if not self.cross:
            given |= {"causal": self.causal, "window_left": self.window_left, "window_right": self.window_right}
        return given

    def ask(self, device: str, *flags: str) -> dict[str, list[str]]:
        """What the engine says about it."""
        op = "attention.cross" if self.cross else "attention"
        dtypes = {"alibi_slopes": "float32"} if self.alibi else {}
        if self.mask is not None:
            dtypes["attn_mask"] = self.mask
        return ask(op, device, self.shapes, self.dtype, *flags, dtypes=dtypes, layout=self.layout, **self.params)

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Tensors for it."""
        made = {}
        for name, shape in self.shapes.items():
            dtype = DTYPES[self.dtype]
            if name == "alibi_slopes":
                made[name] = torch.rand(shape, device=device)
            elif name == "attn_mask":
                drawn = torch.rand(shape, device=device) > 0.3
                drawn[:, :, 0] = False
                made[name] = drawn if self.mask == "bool" else _additive(drawn, DTYPES[str(self.mask)])
            else:
                made[name] = torch.randn(shape, device=device).to(dtype)
        return made

    def arguments(self, kernel: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What the engine would hand to a kernel's function."""
        defaults = {"window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "seed": 0, "scale": None}
        known = {**defaults, "causal": False, **self.params, "layout": self.layout, **tensors}
        return {name: known.get(name) for name in inspect.signature(kernel).parameters}

    def keywords(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of the public function."""
        given = {**self.params, **tensors, "layout": self.layout}
        if not self.cross:
            given["window"] = (given.pop("window_left"), given.pop("window_right"))
        return given

    def expected(self, tensors: dict[str, Tensor]) -> Tensor:
        """What the contract demands, by the loops of `reference`."""
        arrays = {name: t.double().numpy() if t.dtype != torch.bool else t.numpy() for name, t in tensors.items()}
        answer = reference.attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            causal=self.causal and not self.cross,
            scale=self.scale,
            attn_mask=arrays.get("attn_mask"),
            alibi_slopes=arrays.get("alibi_slopes"),
            window=(self.window_left, self.window_right),
            softcap=self.softcap,
            layout=self.layout,
        )
        return torch.from_numpy(np.ascontiguousarray(answer.values))

    def contract(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same by matrix products, on whatever device the tensors are."""
        q, k, v = (tensors[name] for name in ("query", "key", "value"))
        if self.layout == "BSHD":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        causal = self.causal and not self.cross
        allowed = reach(self.seq_q, self.seq_k, causal, self.window_left, self.window_right, q.device)
        bias = None
        if self.alibi:
            query, key = positions(self.seq_q, self.seq_k, q.device)
            bias = -tensors["alibi_slopes"].double()[:, None, None] * (query - key).abs()
        if self.mask == "bool":
            allowed = allowed & tensors["attn_mask"]
        elif self.mask is not None:
            bias = tensors["attn_mask"].double()
            allowed = allowed & (bias != -torch.inf)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        output = attend(q, k, v, allowed, scale, self.softcap, bias)
        return output.transpose(1, 2) if self.layout == "BSHD" else output

    def check(self, got: Tensor, want: Tensor) -> None:
        """The result is what is wanted, to the tolerance of the dtype."""
        assert got.dtype == DTYPES[self.dtype]
        tolerance = TOLERANCES[got.dtype]
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{self}: {m}")


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.randn(allowed.shape, device=allowed.device).masked_fill(~allowed, -torch.inf).to(dtype)


FULL = os.environ.get("LZ_TEST_SCALE") == "full"


def scaled(count: int) -> int:
    """How many calls are drawn: a third of them unless LZ_TEST_SCALE is full, because the engine is made for each."""
    return count if FULL else count // 3


def least(count: int) -> int:
    """How many of them each kernel must have served: one unless LZ_TEST_SCALE is full."""
    return count if FULL else 1


def dense_calls(seed: int, count: int, **fixed: Sequence[Any]) -> Iterator[Dense]:
    """Calls at random, so many at full size; `fixed` gives what to choose from instead."""
    draw = random.Random(seed)
    choices: dict[str, Sequence[Any]] = {
        "batch": (1, 2, 3),
        "seq_q": (1, 2, 5, 17, 33),
        "seq_k": (1, 2, 8, 16, 24, 40),
        "head_dim": (8, 20, 64, 128, 256),
        "dtype": ("float16", "bfloat16"),
        "layout": ("BSHD", "BHSD"),
        "causal": (False, True),
        "scale": (None, 0.3, -0.2, 0.0),
        "window_left": (-1, -1, 0, 3, 30),
        "window_right": (-1, -1, 0, 2, 30),
        "softcap": (0.0, 0.0, 4.0),
        "cross": (False, False, False, True),
        **fixed,
    }
    for _ in range(scaled(count)):
        one = Dense(**{name: draw.choice(values) for name, values in choices.items()})
        kv_heads = draw.choice((1, 2, 3))
        group = draw.choice((1, 1, 2, 3))
        one = replace(
            one, heads=kv_heads * group, kv_heads=kv_heads, v_dim=draw.choice((one.head_dim, one.head_dim, 64))
        )
        if one.cross:
            one = replace(one, causal=False, window_left=-1, window_right=-1)
        one = replace(one, seq_k=one.seq_q) if draw.random() < 0.4 else one
        # A causal call has at least as many keys as queries.
        yield replace(one, causal=one.causal and one.seq_q <= one.seq_k)


@dataclass(frozen=True)
class Paged:
    """A call of attention over pages: one query per sequence, or packed ones."""

    prefill: bool = False
    lengths: tuple[int, ...] = (5, 300, 0)
    rows: tuple[int, ...] = (2, 7, 3)
    lead: int = 0
    tail: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 256
    dtype: str = "float16"
    cache_dtype: str | None = None
    index_dtype: str = "int32"
    layout: str = "NHD"
    four: bool = False
    causal: bool = True
    scale: float | None = None
    window_left: int = -1
    softcap: float = 0.0
    shared_prefix: int = 0

    @property
    def op(self) -> str:
        """The operation it is."""
        kind = "standard" if self.heads == self.kv_heads else "gqa"
        return f"attention.{kind}.{'prefill' if self.prefill else 'decode'}.paged"

    @property
    def blocks(self) -> tuple[int, int]:
        """Pages per sequence, and in all."""
        most = max(1, -(-max(self.lengths) // self.block_size))
        return most, most * len(self.lengths) + 2

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        batch, (most, total) = len(self.lengths), self.blocks
        slots = (self.block_size, self.kv_heads) if self.layout == "NHD" else (self.kv_heads, self.block_size)
        cache = (total, *slots, self.head_dim)
        rows = self.lead + sum(self.rows) + self.tail
        query = (rows, self.heads, self.head_dim) if self.prefill else (batch, self.heads, self.head_dim)
        if self.four and not self.prefill:
            query = (batch, 1, self.heads, self.head_dim)
        found = {"query": query, "key_cache": cache, "value_cache": cache}
        found |= {"block_tables": (batch, most), "context_lens": (batch,)}
        return {**found, "cu_seqlens_q": (batch + 1,)} if self.prefill else found

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters."""
        given: dict[str, Any] = {"window_left": self.window_left, "softcap": self.softcap}
        if self.scale is not None:
            given["scale"] = self.scale
        if self.shared_prefix:
            given["shared_prefix"] = self.shared_prefix
        return {**given, "causal": self.causal} if self.prefill else given

    def ask(self, device: str, *flags: str) -> dict[str, list[str]]:
        """What the engine says about it."""
        indices = dict.fromkeys(set(self.shapes) & {"block_tables", "context_lens", "cu_seqlens_q"}, self.index_dtype)
        cache = dict.fromkeys(("key_cache", "value_cache"), self.cache_dtype or self.dtype)
        return ask(
            self.op, device, self.shapes, self.dtype, *flags, dtypes=indices | cache, layout=self.layout, **self.params
        )

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Tensors for it; page numbers beyond a context are no page's."""
        shapes, index = self.shapes, DTYPES[self.index_dtype]
        batch, (most, total) = len(self.lengths), self.blocks
        tables = torch.randperm(total)[: batch * most].view(batch, most)
        tables[:, : self.shared_prefix // self.block_size] = tables[0, : self.shared_prefix // self.block_size].clone()
        for b, length in enumerate(self.lengths):
            tables[b, -(-length // self.block_size) :] = 1 << 20
        cache = DTYPES[self.cache_dtype or self.dtype]
        made = {
            "query": torch.randn(shapes["query"]).to(DTYPES[self.dtype]),
            "key_cache": torch.randn(shapes["key_cache"]).to(cache),
            "value_cache": torch.randn(shapes["value_cache"]).to(cache),
            "block_tables": tables.to(index),
            "context_lens": torch.tensor(self.lengths, dtype=index),
        }
        if self.prefill:
            made["cu_seqlens_q"] = torch.tensor([self.lead, *self.rows], dtype=index).cumsum(0, dtype=index)
        return {name: t.to(device) for name, t in made.items()}

    def arguments(self, kernel: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What the engine would hand to a kernel's function."""
        known = {
            "scale": None,
            "shared_prefix": 0,
            "sinks": None,
            "window_right": -1,
            "causal": True,
            **self.params,
            "layout": self.layout,
            **tensors,
        }
        return {name: known[name] for name in inspect.signature(kernel).parameters}

    def keywords(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of the public function."""
        given = {**self.params, **tensors, "layout": self.layout}
        given["window"] = given.pop("window_left")
        return given

    def expected(self, tensors: dict[str, Tensor]) -> Tensor:
        """What the contract demands, by the loops of `reference`; rows of no sequence are zeros."""
        arrays = {name: t.cpu().double().numpy() for name, t in tensors.items()}
        answer = reference.paged_attention(
            arrays["query"],
            arrays["key_cache"],
            arrays["value_cache"],
            arrays["block_tables"],
            arrays["context_lens"],
            scale=self.scale,
            cu_seqlens_q=arrays.get("cu_seqlens_q"),
            causal=self.causal and self.prefill,
            window_left=self.window_left,
            softcap=self.softcap,
            layout=self.layout,
        )
        return torch.from_numpy(np.ascontiguousarray(answer.values))

    def check(self, got: Tensor, want: Tensor) -> None:
        """The result is what is wanted, to the tolerance of the dtype."""
        assert got.dtype == DTYPES[self.dtype]
        tolerance = TOLERANCES[got.dtype]
        torch.testing.assert_close(
            got.cpu().double(), want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{self}: {m}"
        )


def paged_calls(seed: int, count: int, **fixed: Sequence[Any]) -> Iterator[Paged]:
    """Calls at random, so many at full size; `fixed` gives what to choose from instead."""
    draw = random.Random(seed)
    choices: dict[str, Sequence[Any]] = {
        "prefill": (False, True),
        "lead": (0, 0, 2),
        "tail": (0, 0, 3),
        "head_dim": (8, 20, 64, 128),
        "block_size": (16, 256),
        "dtype": ("float16", "bfloat16"),
        "cache_dtype": (None,),
        "index_dtype": ("int32", "int64"),
        "layout": ("NHD", "HND"),
        "four": (False, True),
        "causal": (False, True, True),
        "scale": (None, 0.3, -0.2, 0.0),
        "window_left": (-1, -1, 0, 9),
        "softcap": (0.0, 0.0, 4.0),
        **fixed,
    }
    for _ in range(scaled(count)):
        batch, kv_heads, group = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.choice((1, 2, 4, 5))
        lengths = tuple(draw.choice((0, 1, 15, 16, 33, 270)) for _ in range(batch))
        rows = tuple(draw.choice((0, 1, 1, 3, 18)) for _ in range(batch)) if draw.random() < 0.7 else (1,) * batch
        chosen = {name: draw.choice(values) for name, values in choices.items()}
        one = Paged(lengths=lengths, rows=rows, heads=kv_heads * group, kv_heads=kv_heads, **chosen)
        yield one if one.lead + sum(one.rows) + one.tail else replace(one, tail=1)


@dataclass(frozen=True)
class Varlen:
    """A call of attention within packed sequences."""

    rows: tuple[int, ...] = (2, 7, 3)
    lengths: tuple[int, ...] = (5, 30, 0)
    lead: tuple[int, int] = (0, 0)
    tail: tuple[int, int] = (0, 0)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_dim: int = 64
    dtype: str = "float16"
    index_dtype: str = "int32"
    causal: bool = True
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    promised: bool = False

    @property
    def op(self) -> str:
        """The operation it is."""
        return f"attention.{'standard' if self.heads == self.kv_heads else 'gqa'}.prefill.varlen"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors."""
        rows = self.lead[0] + sum(self.rows) + self.tail[0]
        keys = self.lead[1] + sum(self.lengths) + self.tail[1]
        bounds = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (len(self.rows) + 1,))
        found = {"query": (rows, self.heads, self.head_dim), "key": (keys, self.kv_heads, self.head_dim)}
        return {**found, "value": (keys, self.kv_heads, self.v_dim), **bounds}

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters."""
        names = ("causal", "window_left", "window_right", "softcap")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.scale is not None:
            given["scale"] = self.scale
        if self.promised:
            given |= {"max_seqlen_q": max(self.rows), "max_seqlen_k": max(self.lengths) + 3}
        return given

    def ask(self, device: str, *flags: str) -> dict[str, list[str]]:
        """What the engine says about it."""
        indices = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), self.index_dtype)
        return ask(self.op, device, self.shapes, self.dtype, *flags, dtypes=indices, **self.params)

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Tensors for it. What belongs to no sequence is NaN."""
        shapes, index = self.shapes, DTYPES[self.index_dtype]
        made = {name: torch.randn(shapes[name]).to(DTYPES[self.dtype]) for name in ("query", "key", "value")}
        for at, names in enumerate((("query",), ("key", "value"))):
            for name in names:
                made[name][: self.lead[at]] = torch.nan
                made[name][made[name].shape[0] - self.tail[at] :] = torch.nan
        for name, at, counts in (("cu_seqlens_q", 0, self.rows), ("cu_seqlens_k", 1, self.lengths)):
            made[name] = torch.tensor([self.lead[at], *counts], dtype=index).cumsum(0, dtype=index)
        return {name: t.to(device) for name, t in made.items()}

    def arguments(self, kernel: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What the engine would hand to a kernel's function."""
        known = {"scale": None, "sinks": None, "max_seqlen_q": 0, "max_seqlen_k": 0, **self.params, **tensors}
        return {name: known[name] for name in inspect.signature(kernel).parameters}

    def expected(self, tensors: dict[str, Tensor]) -> Tensor:
        """What the contract demands, by the loops of `reference`."""
        arrays = {name: t.cpu().double().numpy() for name, t in tensors.items()}
        sinks = arrays.pop("sinks", None)
        answer = reference.varlen_attention(
            *arrays.values(),
            sinks=sinks,
            causal=self.causal,
            scale=self.scale,
            window=(self.window_left, self.window_right),
            softcap=self.softcap,
        )
        return torch.from_numpy(np.ascontiguousarray(answer.values))

    def check(self, got: Tensor, want: Tensor) -> None:
        """The result is what is wanted, to the tolerance of the dtype."""
        assert got.dtype == DTYPES[self.dtype]
        tolerance = TOLERANCES[got.dtype]
        torch.testing.assert_close(
            got.cpu().double(), want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{self}: {m}"
        )


def varlen_calls(seed: int, count: int, **fixed: Sequence[Any]) -> Iterator[Varlen]:
    """Calls at random, so many at full size; `fixed` gives what to choose from instead."""
    draw = random.Random(seed)
    choices: dict[str, Sequence[Any]] = {
        "head_dim": (8, 20, 64, 128),
        "lead": ((0, 0), (0, 0), (1, 2)),
        "tail": ((0, 0), (0, 0), (3, 1)),
        "dtype": ("float16", "bfloat16"),
        "index_dtype": ("int32", "int32", "int64"),
        "causal": (False, True, True),
        "scale": (None, 0.3, -0.2),
        "window_left": (-1, -1, -1, 0, 9),
        "window_right": (-1, -1, -1, 2),
        "softcap": (0.0, 0.0, 4.0),
        "promised": (False, True),
        **fixed,
    }
    for _ in range(scaled(count)):
        batch, kv_heads, group = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.choice((1, 2, 5))
        lengths = tuple(draw.choice((0, 1, 5, 16, 33)) for _ in range(batch))
        rows = tuple(draw.choice((0, 1, 1, 3, 18)) for _ in range(batch)) if draw.random() < 0.5 else lengths
        rows = (1,) * batch if draw.random() < 0.2 else rows
        chosen = {name: draw.choice(values) for name, values in choices.items()}
        chosen["v_dim"] = chosen["head_dim"] if draw.random() < 0.8 else 64
        one = Varlen(rows=rows, lengths=lengths, heads=kv_heads * group, kv_heads=kv_heads, **chosen)
        yield replace(one, tail=(max(one.tail[0], 1), max(one.tail[1], 1))) if not sum(rows) * sum(lengths) else one
