"""Attention with the logarithm of each softmax's sum, and two such results merged, against loops in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    Stored,
    array,
    draws,
    exact,
    examples,
    head_counts,
    indices,
    scales,
    seldom,
    softcaps,
    stored,
)

FUNCTIONS = {
    "attention_lse": "attention.lse",
    "varlen_attention_lse": "attention.lse.varlen",
    "paged_attention_lse": "attention.lse.paged",
    "merge_states": "attention.merge",
}
STORED = [case for function, op in FUNCTIONS.items() for case in stored(function, op)]
Part = tuple[range, np.ndarray[Any, Any], np.ndarray[Any, Any]]


def by_loops(query: Any, parts: list[Part], v_dim: int, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Output, its growth and the logarithms of rows [rows, heads, dim] over the keys and values of their sequences."""
    scale = 1.0 / math.sqrt(query.shape[2]) if kwargs.get("scale") is None else kwargs["scale"]
    window, softcap = kwargs.get("window"), kwargs.get("softcap", 0.0)
    window = (-1, -1) if window is None else (window, -1) if isinstance(window, int) else window
    out, lse = np.zeros((*query.shape[:2], v_dim)), np.full(query.shape[:2], -np.inf)
    growth, exponent = np.zeros_like(out), np.zeros_like(lse)
    for rows, keys, values in parts:
        for row, head in itertools.product(rows, range(query.shape[1])):
            seen = reference._reach(row + len(keys) - rows.stop, len(keys), kwargs.get("causal", True), window)
            k, v = (x[seen, head // (query.shape[1] // x.shape[1])] for x in (keys, values))
            out[row, head], growth[row, head] = reference.attend(query[row, head], k, v, scale, softcap)
            if not len(k):
                continue
            scores = scale * (k @ query[row, head])
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            lse[row, head] = scores.max() + math.log(np.exp(scores - scores.max()).sum())
            product = abs(scale) * (np.abs(k) @ np.abs(query[row, head])).max()
            exponent[row, head] = 2.0 * (query.shape[2] * product + 4.0 * np.abs(scores).max()) + len(k) + 4.0
    return out, growth, (lse, exponent)


def expected(function: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    x = {
        n: exact(v) if n.startswith(("cu_", "block_", "context_")) else array(v)
        for n, v in kwargs.items()
        if isinstance(v, torch.Tensor)
    }
    if function == "merge_states":
        return merged(x, kwargs["out_a"].dtype)
    dtype, query = kwargs["query"].dtype, x["query"]
    if function == "attention_lse":
        heads_first = kwargs.get("layout") == "BHSD"
        q, k, v = (x[n].swapaxes(1, 2) if heads_first else x[n] for n in ("query", "key", "value"))
        rows = range(q.shape[1])
        each = [by_loops(q[b], [(rows, k[b], v[b])], v.shape[3], kwargs) for b in range(len(q))]
        empty = (np.zeros((0, *q.shape[1:3], v.shape[3])),) * 2, (np.zeros((0, *q.shape[1:3])),) * 2
        out, growth = (np.stack([e[i] for e in each]) if each else empty[0][i] for i in range(2))
        lse, exponent = (np.stack([e[2][i] for e in each]) if each else empty[1][i] for i in range(2))
        if heads_first:
            out, growth, lse, exponent = (a.swapaxes(1, 2) for a in (out, growth, lse, exponent))
    else:
        if function == "varlen_attention_lse":
            starts, firsts = x["cu_seqlens_q"], x["cu_seqlens_k"]
            tokens = [(x["key"][a:b], x["value"][a:b]) for a, b in itertools.pairwise(firsts)]
        else:
            lengths = [int(n) for n in x["context_lens"]]
            starts = x["cu_seqlens_q"] if "cu_seqlens_q" in x else np.arange(len(lengths) + 1)
            layout = kwargs.get("layout", "NHD")
            tokens = [
                tuple(
                    reference._pages(x[n], x["block_tables"][b], length, layout) for n in ("key_cache", "value_cache")
                )
                for b, length in enumerate(lengths)
            ]
        parts = [(range(a, b), *kv) for (a, b), kv in zip(itertools.pairwise(map(int, starts)), tokens, strict=True)]
        v_dim = x["value"].shape[2] if "value" in x else query.shape[2]
        out, growth, (lse, exponent) = by_loops(query, parts, v_dim, kwargs)
    return [
        Expected(out, dtype, growth),
        Expected(lse, torch.float32, exponent, like=dtype if dtype != torch.float64 else None),
    ]


def merged(x: dict[str, Any], dtype: torch.dtype) -> list[Expected]:
    """Both results, weighed by the sums of their softmaxes."""
    out, lse = np.zeros(x["out_a"].shape), np.full(x["lse_a"].shape, -np.inf)
    for at in np.ndindex(lse.shape):
        a, b = float(x["lse_a"][at]), float(x["lse_b"][at])
        if max(a, b) == -np.inf:
            continue
        lse[at] = max(a, b) + math.log(math.exp(a - max(a, b)) + math.exp(b - max(a, b)))
        for part, total in (("out_a", a), ("out_b", b)):
            if total != -np.inf:
                out[at] += math.exp(total - lse[at]) * x[part][at]
    return [Expected(out, dtype, 64.0), Expected(lse, torch.float32, 8.0)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def calls(draw: st.DrawFn, function: str) -> dict[str, Any]:
    dtype, index = draw(st.sampled_from(FLOATS)), draw(indices)
    heads, kv_heads = draw(head_counts())
    d = draw(draws(6))
    if function == "merge_states":
        shape = draw(st.sampled_from(((3, 4), (2, 3, 8), (2, 1, 3, 5), (0, 4))))
        made = {"out_a": d.floats(*shape, dtype=dtype), "out_b": d.floats(*shape, dtype=dtype)}
        for name in ("lse_a", "lse_b"):
            numbers = torch.from_numpy(d.rng.uniform(-9.0, 9.0, shape[:-1])).float()
            made[name] = numbers.masked_fill(torch.from_numpy(d.rng.random(shape[:-1]) < 0.2), -torch.inf)
        return {name: made[name] for name in ("out_a", "lse_a", "out_b", "lse_b")}
    head_dim = draw(st.sampled_from((1, 4, 8, 16, 33)))
    kwargs: dict[str, Any] = {"causal": draw(st.booleans()), "scale": draw(scales), "softcap": draw(softcaps)}
    if draw(seldom(3)):
        kwargs["window"] = draw(st.sampled_from((0, 2, (1, 1), (-1, 2), (3, 0))))
    most = draw(st.sampled_from((6, 20)))
    if function == "attention_lse":
        seq_q, seq_k = draw(st.integers(0, most)), draw(st.integers(0, most))
        kwargs["causal"] &= seq_q <= seq_k
        kwargs["layout"] = draw(st.sampled_from(("BSHD", "BHSD")))
        v_dim = head_dim if draw(st.booleans()) else 5
        for name, seq, count, dim in (
            ("query", seq_q, heads, head_dim),
            ("key", seq_k, kv_heads, head_dim),
            ("value", seq_k, kv_heads, v_dim),
        ):
            shape = (2, seq, count, dim) if kwargs["layout"] == "BSHD" else (2, count, seq, dim)
            kwargs[name] = d.floats(*shape, dtype=dtype)
        return kwargs
    batch = draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, most)) for _ in range(batch)]
    counts = [draw(st.integers(0, most)) for _ in range(batch)]
    if function == "varlen_attention_lse":
        rest = draw(st.integers(0, 2))
        kwargs["query"] = d.floats(sum(counts) + rest, heads, head_dim, dtype=dtype)
        kwargs["key"] = d.floats(sum(lengths) + rest, kv_heads, head_dim, dtype=dtype)
        kwargs["value"] = d.floats(sum(lengths) + rest, kv_heads, head_dim, dtype=dtype)
        kwargs["cu_seqlens_q"] = d.ints_as_they_are(np.cumsum([0, *counts]), index)
        kwargs["cu_seqlens_k"] = d.ints_as_they_are(np.cumsum([0, *lengths]), index)
        return kwargs
    size, layout = draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from(("NHD", "HND")))
    pages = -(-most // size)
    shape = (pages * batch, size, kv_heads, head_dim) if layout == "NHD" else (pages * batch, kv_heads, size, head_dim)
    kwargs |= {name: d.floats(*shape, dtype=dtype) for name in ("key_cache", "value_cache")}
    kwargs["block_tables"] = d.ints_as_they_are(d.rng.permutation(pages * batch).reshape(batch, pages), index)
    kwargs["context_lens"] = d.ints_as_they_are(lengths, index)
    if draw(st.booleans()):
        kwargs["query"] = d.floats(sum(counts), heads, head_dim, dtype=dtype)
        kwargs["cu_seqlens_q"] = d.ints_as_they_are(np.cumsum([0, *counts]), index)
    else:
        kwargs["query"] = d.floats(batch, heads, head_dim, dtype=dtype)
    return kwargs | {"layout": layout}


@pytest.mark.parametrize("function", FUNCTIONS)
@examples(500)
@given(data=st.data())
def test_drawn(function: str, data: st.DataObject, family: Family) -> None:
    kwargs = data.draw(calls(function))
    family.check(function, kwargs, expected(function, kwargs))


# --- return_lse= ------------------------------------------------------------------------------------------------------


def dense() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)


def test_return_lse_is_the_function_with_lse_in_its_name() -> None:
    q, k, v = dense()
    bounds, tables = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([[0], [1]])
    pairs = (
        (lz.attention(q, k, v, return_lse=True), lz.attention_lse(q, k, v)),
        (lz.attention(q, k, v, True, 0.3, window=2, softcap=4.0, return_lse=True), lz.attention_lse(q, k, v, scale=0.3, window=2, softcap=4.0)),
        (
            lz.varlen_attention(k.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds, bounds, return_lse=True),
            lz.varlen_attention_lse(k.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds, bounds),
        ),
        (
            lz.paged_attention(q[:, 0], k, v, tables, torch.tensor([9, 4]), return_lse=True),
            lz.paged_attention_lse(q[:, 0], k, v, tables, torch.tensor([9, 4])),
        ),
    )  # fmt: skip
    for got, want in pairs:
        assert isinstance(got, tuple) and len(got) == 2
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert got[1].dtype == torch.float32 and got[1].shape == got[0].shape[:-1]
    for said in (False, None):
        assert torch.equal(lz.attention(q, k, v, return_lse=said), lz.attention(q, k, v))  # type: ignore[call-overload]


def test_one_query_per_sequence_may_have_an_axis_of_its_own() -> None:
    q, k, v = dense()
    tables, lengths = torch.tensor([[0], [1]]), torch.tensor([9, 4])
    rows = lz.paged_attention(q[:, 0], k, v, tables, lengths, return_lse=True)
    for kernel in (None, "torch.lse.paged.flash", "torch.lse.paged.unfused", "lz_cpu.ref.attention.lse.paged"):
        if kernel is None:
            output, lse = lz.paged_attention(q[:, :1], k, v, tables, lengths, return_lse=True)
        else:
            output, lse = lz.run_kernel(kernel, q[:, :1], k, v, tables, lengths)
        assert output.shape == q[:, :1].shape and lse.shape == q[:, :1].shape[:-1]
        torch.testing.assert_close(output[:, 0], rows[0])
        torch.testing.assert_close(lse[:, 0], rows[1])
        # As attention gives them, so that they can be merged.
        lz.merge_states(output, lse, output, lse)
    traced = torch.compile(lambda q: lz.paged_attention_lse(q, k, v, tables, lengths), backend="eager", fullgraph=True)
    assert traced(q[:, :1])[1].shape == (2, 1, 4)


def test_what_does_not_go_with_the_logarithms_is_refused() -> None:
    q, k, v = dense()
    with pytest.raises(lz.errors.ArgumentTypeError, match="with return_lse=True has no argument 'sinks'"):
        lz.attention(q, k, v, sinks=torch.zeros(4), return_lse=True)
    with pytest.raises(lz.errors.ArgumentTypeError, match="with return_lse=True has no argument 'dropout_p'"):
        lz.attention(q, k, v, dropout_p=0.5, return_lse=True)
    with pytest.raises(lz.errors.ArgumentTypeError, match="'return_lse' is neither True nor False"):
        lz.attention(q, k, v, return_lse="yes")  # type: ignore[call-overload]
    with pytest.raises(lz.errors.ArgumentTypeError, match="calls with return_lse=True are those of 'attention_lse'"):
        lz.which("attention", q, k, v, return_lse=True)
    # What is at its default says nothing.
    assert isinstance(lz.attention(q, k, v, dropout_p=0.0, attn_mask=None, return_lse=True), tuple)


def test_parts_of_the_keys_merged_are_the_whole() -> None:
    q, k, v = dense()
    want = lz.attention(q, k, v, False, return_lse=True)
    first = lz.attention(q, k[:, :4], v[:, :4], False, return_lse=True)
    second = lz.attention(q, k[:, 4:], v[:, 4:], False, return_lse=True)
    for got, wanted in zip(lz.merge_states(*first, *second), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_flow_through_both_results() -> None:
    q, k, v = (t.double().requires_grad_() for t in dense())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = lz.attention(q, k[:, :4], v[:, :4], False, return_lse=True)
        return lz.merge_states(*a, *lz.attention(q, k[:, 4:], v[:, 4:], False, return_lse=True))

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * 8**-0.5
        return torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)

    for inputs in ((q, k, v),):
        got = torch.autograd.grad([t.double().square().sum() for t in attend(*inputs)], inputs)
        want = torch.autograd.grad([t.square().sum() for t in plain(*inputs)], inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_compiled_graph_gives_both() -> None:
    q, k, v = dense()
    compiled = torch.compile(
        lambda q: lz.attention(q, k, v, window=3, return_lse=True), fullgraph=True, backend="eager"
    )
    for got, want in zip(compiled(q), lz.attention(q, k, v, window=3, return_lse=True), strict=True):
        assert torch.equal(got, want)
