"""The literal torch code that overhead is measured against does what LayerZero's functions do."""

from __future__ import annotations

import layerzero as lz
import pytest
from layerzero import _native
from layerzero.bench import literal

CASES = literal.cases()


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_sides_give_the_same(case: literal.Case) -> None:
    assert literal.agrees(case)


def test_every_function_is_there() -> None:
    """But for those whose literal code would be a page long, and packed weights, which torch has none of."""
    functions = {function["name"] for function in _native.functions()}
    there = {name for name in functions if any(case.name.split(",")[0] == name for case in CASES)}
    long = {"mla_attention", "sparse_attention", "kv_compact", "varlen_attention_lse", "paged_attention_lse"}
    assert functions - there == long | {"linear_packed", "linear_quantized"}
    assert hasattr(lz, "scaled_dot_product_attention")
