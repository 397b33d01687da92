"""Eager calls and the operators, on the calls of every public function (`support/torch_cases.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_cases import CASES, IDS, Case, assert_right, expected, run


def test_every_public_function_has_a_case() -> None:
    from layerzero import _native

    assert {function["name"] for function in _native.functions()} == {case.function for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_eager_calls_give_what_the_definition_says(case: Case) -> None:
    for n in (5, 7):
        assert_right(run(case, case.call, n), expected(case, n))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_operators_give_what_the_definition_says(case: Case) -> None:
    def operator(*args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("window")
        if isinstance(window, int):
            kwargs["window"] = [window]
        result = getattr(torch.ops.layerzero, case.function)(*args, **kwargs)
        return result[0] if case.id == "quantize-given-scale" else result

    got = run(case, operator)
    assert_right(got, expected(case))
    assert all(tensor.is_contiguous() for tensor in got)
