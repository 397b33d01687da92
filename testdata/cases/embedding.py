"""Embedding lookup."""

from collections.abc import Iterator

import numpy as np

from .case import NAN, Case, Draw, Expected, Tensor, bad_data, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS

OP = "embedding.lookup"
VOCAB, HIDDEN = 7, 4


def _case(name: str, weight: Tensor, indices: Tensor, call: str = OP) -> Case:
    out = weight.values[indices.values]
    return Case(name, call, {"indices": indices, "weight": weight}, {"output": Expected(weight.dtype, out, exact=True)})


def _cases() -> Iterator[Case]:
    for dtype in FLOATS:
        draw = Draw(OP, dtype)
        yield _case(dtype, draw.floats(dtype, VOCAB, HIDDEN), draw.ints("int64", 0, VOCAB, 5))
        yield _case(f"{dtype}_int32_rank_2", draw.floats(dtype, VOCAB, HIDDEN), draw.ints("int32", 0, VOCAB, 2, 3))
    draw = Draw(OP, "edges")
    weight = draw.coarse("float32", VOCAB, HIDDEN)
    indices = draw.ints("int64", 0, VOCAB, 2, 3)
    yield _case("one_index", weight, tensor("int64", 4))
    yield _case("rank_3", weight, draw.ints("int32", 0, VOCAB, 2, 1, 2))
    yield _case("first_and_last", weight, tensor("int64", [0, VOCAB - 1, 0]))
    yield _case("no_indices", weight, tensor("int64", np.zeros(0, dtype=np.int64)))
    yield _case("no_rows_of_many", weight, tensor("int32", np.zeros((2, 0), dtype=np.int64)))
    yield _case(
        "no_indices_no_table", tensor("float32", np.zeros((0, 4))), tensor("int64", np.zeros(0, dtype=np.int64))
    )
    yield _case("no_columns", tensor("float32", np.zeros((3, 0))), tensor("int64", [2, 1]))
    yield _case("nan_is_moved", with_value(weight, (2, 1), NAN), tensor("int64", [1, 2, 2]))
    yield _case("weight_transposed", transposed(weight, 0, 1), indices)
    yield _case("weight_gaps", every_other(weight), indices)
    yield _case("weight_padded_bfloat16", padded_rows(tensor("bfloat16", weight.values)), indices)
    yield _case("indices_transposed", weight, transposed(indices, 0, 1))
    yield _case("indices_gaps", weight, every_other(indices))
    yield _case("alias_embedding", weight, indices, "embedding")
    for name, index in [
        ("error_index_is_the_table_size", VOCAB),
        ("error_negative_index", -1),
        ("error_huge_index", 1 << 40),
    ]:
        yield bad_data(name, OP, {"indices": tensor("int64", [0, index]), "weight": weight})


CASES = {OP: _cases}


def check() -> None:
    """A lookup is a product with rows of the identity."""
    weight, indices = Draw("lookup").floats("float64", VOCAB, HIDDEN), np.array([3, 0, 3])
    case = _case("", weight, tensor("int64", indices))
    assert case.expect is not None
    assert np.array_equal(np.eye(VOCAB)[indices] @ weight.values, case.expect["output"].values)
