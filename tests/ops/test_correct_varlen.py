"""Attention within packed sequences of different lengths."""

from __future__ import annotations

import inspect
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, is_refused, run_stored
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
    put_nan,
    scales,
    seldom,
    softcaps,
    stored,
)

STORED = stored("varlen_attention", *(f"attention.{kind}.prefill.varlen" for kind in ("standard", "gqa")))


def expected(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    window = kwargs.get("window")
    answer = reference.varlen_attention(
        *(array(kwargs[n]) for n in ("query", "key", "value")),
        *(exact(kwargs[n]) for n in ("cu_seqlens_q", "cu_seqlens_k")),
        causal=kwargs.get("causal", True),
        scale=kwargs.get("scale"),
        window=(-1, -1) if window is None else (window, -1) if isinstance(window, int) else window,
        softcap=kwargs.get("softcap", 0.0),
        sinks=None if kwargs.get("sinks") is None else array(kwargs["sinks"]),
    )
    return [Expected(answer.values, kwargs["query"].dtype, answer.growth, answer.may_be_nan)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def packed(draw: st.DrawFn, long: bool = False) -> dict[str, Any]:
    dtype, index = draw(st.sampled_from(FLOATS)), draw(indices)
    heads, kv_heads = draw(head_counts())
    batch = draw(st.integers(1, 3)) if not draw(seldom()) else 0
    most = 70 if long else 9
    lengths = [draw(st.integers(0, most)) for _ in range(batch)]
    counts = lengths if draw(st.booleans()) else [draw(st.integers(0, most)) for _ in range(batch)]
    lead, rest = ((draw(st.integers(0, 2)), draw(st.integers(0, 2))) if draw(seldom(3)) else (0, 0) for _ in range(2))
    head_dim = draw(st.sampled_from((64, 128)) if long else st.sampled_from((1, 4, 8, 16, 33)))
    v_dim = head_dim if draw(st.booleans()) else draw(st.sampled_from((1, 8, 24)))
    d = draw(draws(6))
    starts, firsts = np.cumsum([lead[0], *counts]), np.cumsum([lead[1], *lengths])
    kwargs: dict[str, Any] = {
        "query": d.floats(int(starts[-1]) + rest[0], heads, head_dim, dtype=dtype),
        "key": d.floats(int(firsts[-1]) + rest[1], kv_heads, head_dim, dtype=dtype),
        "value": d.floats(int(firsts[-1]) + rest[1], kv_heads, v_dim, dtype=dtype),
        "cu_seqlens_q": d.ints_as_they_are(starts, index),
        "cu_seqlens_k": d.ints_as_they_are(firsts, index),
        "causal": draw(st.booleans()),
        "scale": draw(scales),
        "softcap": draw(softcaps),
    }
    if draw(seldom(3)):
        kwargs["window"] = draw(st.sampled_from((0, 2, (1, 1), (-1, 2), (3, 0), (5, -1))))
    if draw(seldom(2)):
        kwargs["max_seqlen_q"] = max(counts, default=0) + draw(st.integers(0, 3))
        kwargs["max_seqlen_k"] = max(lengths, default=0) + draw(st.integers(0, 3))
    if draw(seldom(3)):
        kwargs["sinks"] = d.floats(heads, dtype=draw(st.sampled_from((torch.float32, dtype))))
    if draw(seldom()):
        kwargs["query"] = put_nan(kwargs["query"], d.rng)
    return kwargs


@examples(2000)
@given(kwargs=packed())
def test_packed_sequences(kwargs: dict[str, Any], family: Family) -> None:
    family.check("varlen_attention", kwargs, expected(kwargs))


@examples(60)
@given(kwargs=packed(long=True))
def test_longer_sequences(kwargs: dict[str, Any], family: Family) -> None:
    family.check("varlen_attention", kwargs, expected(kwargs))


# --- the signatures of others -----------------------------------------------------------------------------------------


def call() -> dict[str, Any]:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    return {
        "query": torch.randn(7, 4, 8),
        "key": torch.randn(7, 2, 8),
        "value": torch.randn(7, 2, 8),
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds.clone(),
    }


def test_flash_attentions_names_and_order_work() -> None:
    given = call()
    want = lz.varlen_attention(**given, causal=True, scale=0.3, window=(2, 0), softcap=5.0)
    q, k, v, rows, keys = given.values()
    got = lz.varlen_attention(
        q=q, k=k, v=v, cu_seqlens_q=rows, cu_seqlens_k=keys, max_seqlen_q=4, max_seqlen_k=4,
        softmax_scale=0.3, causal=True, window_size=(2, 0), softcap=5.0,
    )  # fmt: skip
    assert torch.equal(got, want)
    # flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...)
    got = lz.varlen_attention(
        q, k, v, rows, keys, 4, 4, softmax_scale=0.3, causal=True, window_size=(2, 0), softcap=5.0
    )
    assert torch.equal(got, want)
    # torch.nn.attention.varlen.varlen_attn and FlashInfer.
    got = lz.varlen_attention(q, k, v, cu_seq_q=rows, cu_seq_k=keys, max_q=4, max_k=4, is_causal=True)
    assert torch.equal(got, lz.varlen_attention(q, k, v, qo_indptr=rows, kv_indptr=keys))


def test_other_names_work_for_every_function_and_are_documented() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    assert torch.equal(lz.attention(q=q, k=k, v=v, sm_scale=0.2, is_causal=False), lz.attention(q, k, v, False, 0.2))
    assert torch.equal(lz.attention(q, k, v, window_size=(2, -1)), lz.attention(q, k, v, window=2))
    assert lz.which("attention", q=q, k=k, v=v).op == "attention.standard.prefill"
    assert "Also: sm_scale, softmax_scale." in inspect.getdoc(lz.attention)  # type: ignore[operator]
    with pytest.raises(lz.errors.ArgumentTypeError, match="got 'scale' twice"):
        lz.attention(q, k, v, scale=0.2, softmax_scale=0.2)


def test_other_names_work_while_a_graph_is_traced() -> None:
    given = call()
    q, k, v, rows, keys = given.values()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return lz.varlen_attention(q=q, k=k, v=v, cu_seqlens_q=rows, cu_seqlens_k=keys, softmax_scale=0.3)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), lz.varlen_attention(**given, scale=0.3))


def test_a_sequence_longer_than_promised_is_refused_by_every_kernel() -> None:
    given = call()
    op = lz.which("varlen_attention", **given).op
    names = [kernel.kernel_id for kernel in lz.list_kernels(op) if kernel.available]
    assert len(names) >= 3
    for name in names:
        for promise in ("max_seqlen_q", "max_seqlen_k"):
            if not lz.validate(name, **given, **{promise: 3})[0]:
                continue
            with pytest.raises(lz.InvalidCallError, match=f"{promise} is 3, expected at least 4") as raised:
                lz.run_kernel(name, **given, **{promise: 3})
            assert raised.value.code == "BAD_DATA"
