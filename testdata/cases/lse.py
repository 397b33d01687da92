"""Attention with the logarithm of each softmax's sum, and two such results merged."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from .attention import attend, reachable
from .case import INF, NAN, Case, Draw, Expected, Tensor, every_other, tensor, transposed, with_value
from .number import FLOATS, FLOATS_AND_FP8, dot, exp, tanh, total
from .paged import gathered, tables_for


def log(x: float) -> float:
    """The natural logarithm; minus infinity of nothing."""
    return math.log(x) if x > 0 else -INF


def log_sums(q: np.ndarray, k: np.ndarray, allowed: np.ndarray, *, scale: float, softcap: float = 0.0) -> np.ndarray:
    """One head: log(sum(exp(scores))) of queries [s, d] over the keys [t, d] each may see."""
    out = np.full(q.shape[0], -INF)
    for i in range(q.shape[0]):
        scores = [scale * dot(q[i], k[j]) for j in range(k.shape[0]) if allowed[i, j]]
        if softcap > 0:
            scores = [softcap * tanh(s / softcap) for s in scores]
        if scores:
            top = max(scores)
            out[i] = NAN if any(map(math.isnan, scores)) else top + log(total(exp(s - top) for s in scores))
    return out


def sequences(
    q: np.ndarray,
    parts: list[tuple[slice, np.ndarray, np.ndarray]],
    v_dim: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> dict[str, np.ndarray]:
    """Rows [rows, heads, d] of sequences, each with keys and values [t, kv heads, d]."""
    out, lse = np.zeros((*q.shape[:2], v_dim)), np.full(q.shape[:2], -INF)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    for rows, k, v in parts:
        allowed = reachable(rows.stop - rows.start, len(k), causal, window_left, window_right)
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            out[rows, h] = attend(q[rows, h], k[:, kv], v[:, kv], allowed, softcap=softcap, scale=scale)
            lse[rows, h] = log_sums(q[rows, h], k[:, kv], allowed, softcap=softcap, scale=scale)
    return {"output": out, "lse": lse}


def expected(dtype: str, given: dict[str, np.ndarray]) -> dict[str, Expected]:
    return {"output": Expected(dtype, given["output"]), "lse": Expected("float32", given["lse"])}


def _dense(
    name: str,
    dtype: str = "float32",
    *,
    sizes: tuple[int, int] = (3, 5),
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (4, 4),
    layout: str = "BSHD",
    full_precision: bool = False,
    strided: bool = False,
    **params: Any,
) -> Case:
    draw = Draw("attention.lse", name)
    fill = draw.floats if full_precision else draw.coarse
    q = fill(dtype, 2, sizes[0], heads[0], dims[0])
    k, v = fill(dtype, 2, sizes[1], heads[1], dims[0]), fill(dtype, 2, sizes[1], heads[1], dims[1])
    parts = [
        sequences(q.values[b], [(slice(0, sizes[0]), k.values[b], v.values[b])], dims[1], **params) for b in range(2)
    ]
    given = {n: np.stack([part[n] for part in parts]) for n in ("output", "lse")}
    inputs = {"query": q, "key": k, "value": v}
    if layout == "BHSD":
        inputs = {n: tensor(t.dtype, t.values.swapaxes(1, 2)) for n, t in inputs.items()}
        given = {n: x.swapaxes(1, 2) for n, x in given.items()}
    if strided:
        inputs |= {"query": every_other(inputs["query"]), "key": transposed(inputs["key"], 1, 2)}
    return Case(name, "attention.lse", inputs, expected(dtype, given), params, layout)


def dense_cases() -> Iterator[Case]:
    for dtype in FLOATS_AND_FP8:
        yield _dense(dtype, dtype, full_precision=True)
        yield _dense(f"{dtype}_bhsd_full", dtype, layout="BHSD", causal=False)
    yield _dense("standard", heads=(2, 2))
    yield _dense("groups", heads=(4, 2), layout="BHSD")
    yield _dense("decode", sizes=(1, 6))
    yield _dense("long", "bfloat16", sizes=(18, 18), heads=(1, 1))
    yield _dense("wide_values", dims=(4, 6))
    yield _dense("strided", strided=True)
    yield _dense("scale", scale=0.3)
    yield _dense("softcap", softcap=0.75)
    yield _dense("window", window_left=1)
    yield _dense("window_both", window_left=1, window_right=1, causal=False)
    yield _dense("nothing_to_attend_to", sizes=(5, 3), causal=False, window_right=0)
    yield _dense("no_keys", sizes=(2, 0), causal=False)
    yield _dense("large_scores", scale=300.0)


def _varlen(
    name: str,
    dtype: str = "float32",
    *,
    queries: tuple[int, ...] = (2, 1),
    lengths: tuple[int, ...] = (5, 2),
    rest: tuple[int, int] = (0, 0),
    heads: tuple[int, int] = (2, 1),
    v_dim: int = 4,
    index: str = "int32",
    **params: Any,
) -> Case:
    draw = Draw("attention.lse.varlen", name)
    starts, firsts = (np.cumsum([0, *counts]) for counts in (queries, lengths))
    inputs = {
        "query": draw.coarse(dtype, int(starts[-1]) + rest[0], heads[0], 4),
        "key": draw.coarse(dtype, int(firsts[-1]) + rest[1], heads[1], 4),
        "value": draw.coarse(dtype, int(firsts[-1]) + rest[1], heads[1], v_dim),
        "cu_seqlens_q": tensor(index, starts),
        "cu_seqlens_k": tensor(index, firsts),
    }
    k, v = inputs["key"].values, inputs["value"].values
    parts = [
        (slice(starts[b], starts[b + 1]), k[firsts[b] : firsts[b + 1]], v[firsts[b] : firsts[b + 1]])
        for b in range(len(queries))
    ]
    said = {n: x for n, x in params.items() if not n.startswith("max_")}
    given = sequences(inputs["query"].values, parts, v_dim, **said)
    return Case(name, "attention.lse.varlen", inputs, expected(dtype, given), params, None)


def varlen_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _varlen(dtype, dtype)
        yield _varlen(f"{dtype}_full", dtype, causal=False, index="int64", heads=(2, 2))
    yield _varlen("promised", max_seqlen_q=2, max_seqlen_k=5)
    yield _varlen("empty_sequences", queries=(2, 0, 2), lengths=(4, 2, 0))
    yield _varlen("more_queries_than_keys", queries=(4, 1), lengths=(2, 3))
    yield _varlen("rows_of_no_sequence", rest=(2, 1))
    yield _varlen("no_sequences", queries=(), lengths=(), rest=(2, 1))
    yield _varlen("long", queries=(17,), lengths=(19,), v_dim=6)
    yield _varlen("options", "float64", scale=0.9, softcap=1.5, window_left=2)
    yield _varlen("window_both", causal=False, window_left=1, window_right=1)


def _paged(
    name: str,
    dtype: str = "float32",
    cache: str | None = None,
    *,
    queries: tuple[int, ...] | None = (2, 1),
    lengths: tuple[int, ...] = (5, 2),
    heads: tuple[int, int] = (2, 1),
    layout: str = "NHD",
    index: str = "int32",
    rest: int = 0,
    **params: Any,
) -> Case:
    draw = Draw("attention.lse.paged", name)
    counts = (1,) * len(lengths) if queries is None else queries
    starts = np.cumsum([0, *counts])
    pages = draw.coarse(cache or dtype, 6, 2, heads[1], 4), draw.coarse(cache or dtype, 6, 2, heads[1], 4)
    tables = tables_for(draw, index, list(lengths), 2, 6, 4, 0)
    inputs = {
        "query": draw.coarse(dtype, int(starts[-1]) + rest, heads[0], 4),
        "key_cache": pages[0],
        "value_cache": pages[1],
        "block_tables": tables,
        "context_lens": tensor(index, np.array(lengths, dtype=np.int64)),
    }
    keys, values = ([gathered(one.values, *pair) for pair in zip(tables.values, lengths, strict=True)] for one in pages)
    rows = [slice(first, end) for first, end in pairwise(starts)]
    parts = list(zip(rows, keys, values, strict=True))
    given = sequences(inputs["query"].values, parts, 4, **params)
    if queries is not None:
        inputs["cu_seqlens_q"] = tensor(index, starts)
    if layout == "HND":
        inputs |= {n: tensor(t.dtype, t.values.swapaxes(1, 2)) for n, t in inputs.items() if n.endswith("_cache")}
    return Case(name, "attention.lse.paged", inputs, expected(dtype, given), params, layout)


def paged_cases() -> Iterator[Case]:
    for dtype in FLOATS_AND_FP8:
        yield _paged(dtype, dtype)
        yield _paged(f"{dtype}_decode_hnd", dtype, queries=None, layout="HND", index="int64", heads=(4, 2))
    yield _paged("narrow_cache", "bfloat16", "float8_e4m3fn")
    yield _paged("no_context", lengths=(0, 3))
    yield _paged("no_context_decode", queries=None, lengths=(0, 3))
    yield _paged("more_queries_than_context", queries=(4, 1), lengths=(2, 3))
    yield _paged("rows_of_no_sequence", rest=2)
    yield _paged("full", causal=False)
    yield _paged("options", "float64", scale=0.9, softcap=1.5, window_left=2)
    yield _paged("window_both", causal=False, window_left=1, window_right=1)


def merged(a: np.ndarray, lse_a: np.ndarray, b: np.ndarray, lse_b: np.ndarray) -> dict[str, np.ndarray]:
    """Two results as one."""
    out, lse = np.zeros(a.shape), np.full(lse_a.shape, -INF)
    for at in np.ndindex(lse_a.shape):
        top = max(lse_a[at], lse_b[at])
        if top == -INF:
            continue
        weights = [exp(float(x[at] - top)) if x[at] != -INF else 0.0 for x in (lse_a, lse_b)]
        lse[at] = top + log(total(weights))
        parts = [part[at] * w for part, w in zip((a, b), weights, strict=True) if w > 0]
        out[at] = np.sum(parts, axis=0) / total(weights)
    return {"output": out, "lse": lse}


def _merge(name: str, dtype: str = "float32", shape: tuple[int, ...] = (3, 2, 4), **none: tuple[int, ...]) -> Case:
    draw = Draw("attention.merge", name)

    def logarithms(part: str) -> Tensor:
        made = draw.coarse("float32", *shape[:-1], bound=6.0)
        return with_value(made, none[part], -INF) if part in none else made

    inputs = {
        "out_a": draw.floats(dtype, *shape),
        "lse_a": logarithms("a"),
        "out_b": draw.floats(dtype, *shape),
        "lse_b": logarithms("b"),
    }
    for part, at in none.items():
        inputs[f"out_{part}"] = with_value(inputs[f"out_{part}"], (*at, 0), NAN)
    given = merged(*(t.values for t in inputs.values()))
    return Case(name, "attention.merge", inputs, expected(dtype, given), {}, None)


def merge_cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _merge(dtype, dtype)
    yield _merge("four_dimensions", shape=(2, 3, 2, 4))
    yield _merge("one_row", shape=(1, 4))
    yield _merge("no_rows", shape=(0, 2, 4))
    yield _merge("nothing_in_a", a=(1, 0))
    yield _merge("nothing_in_b", "bfloat16", b=(0, 1))
    yield _merge("nothing_in_both", a=(1, 1), b=(1, 1))


CASES = {
    "attention.lse": dense_cases,
    "attention.lse.varlen": varlen_cases,
    "attention.lse.paged": paged_cases,
    "attention.merge": merge_cases,
}


def check() -> None:
    """Attention to all keys is that to two halves of them, merged."""
    draw = Draw("lse", "check")
    q, k, v = (draw.floats("float64", *s).values for s in ((3, 2, 4), (6, 1, 4), (6, 1, 5)))
    rows = slice(0, 3)
    whole = sequences(q, [(rows, k, v)], 5, causal=False)
    halves = [sequences(q, [(rows, k[part], v[part])], 5, causal=False) for part in (slice(0, 2), slice(2, 6))]
    got = merged(*(half[n] for half in halves for n in ("output", "lse")))
    assert all(np.allclose(got[n], whole[n], rtol=1e-13) for n in whole)
    scores = k[:, 0] @ q[1, 0] / 2
    assert abs(whole["lse"][1, 0] - math.log(np.exp(scores).sum())) < 1e-13
