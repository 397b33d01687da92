"""FlashAttention 3 past its Python: what its operator is given, by an operator of the same schema that writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_attn_installed import install, kernel
from layerzero.backends.flash_attn_3 import operator
from torch import Tensor

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
#: What is given to it whatever the call is.
ALWAYS = {"is_rotary_interleaved": True}
#: What is there where the schema says nothing else.
DEFAULTS = {"window_size_left": -1, "window_size_right": -1, "is_causal": False, "softcap": 0.0}
ZERO = ("attention_chunk", "num_splits", "sm_margin")


class Library:
    """The operator."""

    def __init__(self, schema: str) -> None:
        self.given: dict[str, Any] = {}
        self._made = torch.library.Library("flash_attn_3", "FRAGMENT")
        self._made.define(schema)
        self._made.impl("fwd", self._run, "CompositeExplicitAutograd")

    def _run(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.given = dict(zip(operator.ARGUMENTS, given, strict=False))
        return given[0] + 1.0, *(torch.empty(0) for _ in range(3))

    def close(self) -> None:
        self._made._destroy()


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library(SCHEMA)
    yield made
    made.close()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 8, 4, 64) for _ in range(3))
    return q, k, v


def test_dense_calls(library: Library) -> None:
    q, k, v = operands()
    output = operator.forward(operator.find())(q, k, v, None, True, (127, -1), 30.0)
    assert torch.equal(output, q + 1.0), "the first of what it gives"
    given = library.given
    assert all(torch.equal(given.pop(name), tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
    told = {
        "softmax_scale": 0.125,
        "is_causal": True,
        "window_size_left": 127,
        "window_size_right": -1,
        "softcap": 30.0,
    }
    for name, value in given.items():
        expected = told.get(name, ALWAYS.get(name, 0 if name in ZERO else None))
        assert value == expected, f"{name} is {value}, not {expected}"


def test_calls_over_pages(library: Library) -> None:
    q, k, v = operands()
    lengths, table, bounds = (torch.arange(n, dtype=torch.int32) for n in (1, 2, 3))
    call = operator.forward(operator.find())
    call(q, k, v, softmax_scale=0.5, cache_seqlens=lengths, page_table=table, cu_seqlens_q=bounds, max_seqlen_q=8)
    given = library.given
    assert torch.equal(given.pop("seqused_k"), lengths)
    assert torch.equal(given.pop("page_table"), table)
    assert torch.equal(given.pop("cu_seqlens_q"), bounds)
    told = {**DEFAULTS, **ALWAYS, "max_seqlen_q": 8, "softmax_scale": 0.5}
    for name, value in given.items():
        if name not in ("q", "k", "v"):
            expected = told.get(name, 0 if name in ZERO else None)
            assert value == expected, f"{name} is {value}, not {expected}"


def test_an_operator_that_takes_something_else_is_not_used() -> None:
    assert operator.find() is None, "there is none"
    other = Library(SCHEMA.replace("sm_margin", "margin"))
    try:
        assert operator.find() is None
    finally:
        other.close()


def test_kernels_without_gradients_go_to_it_and_others_to_the_library(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "flash_attn_3")
    q, k, v = (tensor.bfloat16() for tensor in operands())
    dense: dict[str, Any] = {"causal": True, "scale": 0.5, "window_left": 7, "window_right": -1, "softcap": 2.0}
    output = kernel("flash_attn_3", "flash_attn.v3")(q, k, v, **dense, layout="BSHD")
    assert torch.equal(output, q + 1.0) and library.given["window_size_left"] == 7 and library.given["softcap"] == 2.0
    library.given = {}
    kernel("flash_attn_3", "flash_attn.v3.train")(q, k, v, **dense, layout="BSHD")
    assert not library.given
    lengths, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    pages: dict[str, Any] = {"scale": None, "window_left": -1, "softcap": 0.0, "layout": "NHD"}
    kernel("flash_attn_3", "flash_attn.v3.paged.decode")(q[:, 0], k, v, table, lengths, **pages)
    assert torch.equal(library.given["seqused_k"], lengths) and torch.equal(library.given["page_table"], table)
