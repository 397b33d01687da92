"""Block-sparse attention."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .attention import attend, dense
from .case import NAN, Case, Draw, Expected, Tensor, bad_data, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS


def masked(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float | None = None) -> np.ndarray:
    """Queries [s, heads, d], keys and values [t, kv_heads, d], allowed [kv_heads, s, t]."""
    out = np.zeros(q.shape)
    for h in range(q.shape[1]):
        kv = h // (q.shape[1] // k.shape[1])
        out[:, h] = attend(
            q[:, h], k[:, kv], v[:, kv], allowed[kv], scale=1 / math.sqrt(q.shape[2]) if scale is None else scale
        )
    return out


def _inputs(
    draw: Draw, dtype: str, full_precision: bool, s: int, t: int, h: int, kv: int, dim: int = 4
) -> dict[str, Tensor]:
    fill = draw.floats if full_precision else draw.coarse
    return {"query": fill(dtype, s, h, dim), "key": fill(dtype, t, kv, dim), "value": fill(dtype, t, kv, dim)}


ROWS = [[0, 2], [], [1]]


def _block_case(
    name: str,
    dtype: str = "float32",
    *,
    rows: list[list[int]] = ROWS,
    cols: int = 3,
    size: tuple[int, int] = (2, 2),
    heads: tuple[int, int] = (2, 1),
    index: str = "int32",
    call: str = "attention.sparse.block",
    full_precision: bool = False,
    edit: Any = None,
    view: Any = None,
    **params: Any,
) -> Case:
    r, c = size
    inputs = _inputs(Draw("attention.sparse.block", name), dtype, full_precision, len(rows) * r, cols * c, *heads)
    inputs = edit(inputs) if edit else inputs
    allowed = np.zeros((heads[1], len(rows) * r, cols * c), dtype=bool)
    for i, listed in enumerate(rows):
        for j in listed:
            allowed[:, i * r : (i + 1) * r, j * c : (j + 1) * c] = True
    out = masked(inputs["query"].values, inputs["key"].values, inputs["value"].values, allowed, **params)
    inputs = view(inputs) if view else inputs
    inputs |= {
        "indptr": tensor(index, np.concatenate([[0], np.cumsum([len(x) for x in rows])]).astype(np.int64)),
        "indices": tensor(index, np.array([j for x in rows for j in x], dtype=np.int64)),
    }
    return Case(name, call, inputs, {"output": Expected(dtype, out)}, {"block_rows": r, "block_cols": c} | params)


STRIDED = {"query": lambda t: transposed(t, 0, 1), "key": every_other, "value": padded_rows}


def _strided(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: STRIDED[n](t) for n, t in inputs.items()}


def _block() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _block_case(dtype, dtype, heads=(2, 2), full_precision=True)
        yield _block_case(f"{dtype}_int64_gqa", dtype, index="int64", heads=(4, 2), rows=[[1], [0, 2]])
    yield _block_case("scale", scale=0.2)
    yield _block_case("multi_query", heads=(3, 1))
    yield _block_case("columns_out_of_order", rows=[[2, 0], [2, 1, 0], [1]])
    yield _block_case("every_block", rows=[[0, 1, 2]] * 3)
    yield _block_case("no_block", rows=[[], []])
    yield _block_case("one_by_one_blocks", rows=[[0, 3], [1], [], [2, 3]], cols=4, size=(1, 1))
    yield _block_case("tall_blocks", rows=[[1], [0, 1]], cols=2, size=(3, 1))
    yield _block_case("wide_blocks", rows=[[1], [0], []], cols=2, size=(1, 3))
    yield _block_case("no_rows", rows=[])
    yield _block_case("no_keys", rows=[[], []], cols=0)
    yield _block_case("strided", view=_strided, heads=(2, 2))
    yield _block_case("strided_bfloat16", "bfloat16", view=_strided, heads=(4, 2))
    yield _block_case(
        "nan_outside_the_blocks",
        rows=[[0], [2], [0, 2]],
        edit=lambda x: {n: t if n == "query" else with_value(t, (3, 0, 0), NAN) for n, t in x.items()},
    )
    yield _block_case("nan_inside_a_block", edit=lambda x: x | {"key": with_value(x["key"], (2, 0, 1), NAN)})
    yield _block_case("alias_sparse", call="attention.sparse")
    good = _block_case("error")
    op = "attention.sparse.block"
    yield bad_data(
        "error_column_beyond_the_keys", op, good.inputs | {"indices": tensor("int32", [0, 3, 1])}, good.params
    )
    yield bad_data("error_negative_column", op, good.inputs | {"indices": tensor("int32", [0, -1, 1])}, good.params)
    yield bad_data(
        "error_rows_beyond_the_indices", op, good.inputs | {"indptr": tensor("int32", [0, 2, 2, 4])}, good.params
    )
    yield bad_data("error_rows_go_backwards", op, good.inputs | {"indptr": tensor("int32", [0, 2, 1, 3])}, good.params)


def _variable_case(
    name: str,
    dtype: str = "float32",
    *,
    mask: list[Any],
    row_sizes: list[list[int]],
    col_sizes: list[list[int]],
    heads: tuple[int, int] = (2, 2),
    index: str = "int32",
    layout: str | None = None,
    call: str = "attention.sparse.variable_block",
    full_precision: bool = False,
    edit: Any = None,
    view: Any = None,
    **params: Any,
) -> Case:
    s, t = sum(row_sizes[0]), sum(col_sizes[0])
    assert all(sum(x) == s for x in row_sizes) and all(sum(x) == t for x in col_sizes)
    inputs = _inputs(Draw("attention.sparse.variable_block", name), dtype, full_precision, s, t, *heads)
    inputs = edit(inputs) if edit else inputs
    blocks = np.array(mask, dtype=np.int64)
    allowed = np.array([blocks[h].repeat(row_sizes[h], 0).repeat(col_sizes[h], 1) for h in range(heads[1])]) != 0
    out = masked(inputs["query"].values, inputs["key"].values, inputs["value"].values, allowed, **params)
    if layout != "NHD":
        inputs = {n: tensor(dtype, x.values.swapaxes(0, 1)) for n, x in inputs.items()}
        out = out.swapaxes(0, 1)
    inputs = view(inputs) if view else inputs
    inputs |= {
        "block_mask": tensor("bool", blocks),
        "block_row_sizes": tensor(index, row_sizes),
        "block_col_sizes": tensor(index, col_sizes),
    }
    return Case(name, call, inputs, {"output": Expected(dtype, out)}, params, layout)


def _variable() -> Iterator[Case]:
    usual: dict[str, Any] = {
        "mask": [[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]]],
        "row_sizes": [[2, 3], [4, 1]],
        "col_sizes": [[1, 2, 3], [3, 1, 2]],
    }

    def of(name: str, *args: Any, **kwargs: Any) -> Case:
        return _variable_case(name, *args, **(usual | kwargs))

    for dtype in FLOATS:
        yield of(dtype, dtype, full_precision=True)
        yield of(f"{dtype}_nhd_int64_gqa", dtype, layout="NHD", index="int64", heads=(4, 2))
    yield of("hnd_said", layout="HND", heads=(4, 2))
    yield of("scale", scale=0.2)
    yield of("multi_query", heads=(3, 1), mask=usual["mask"][1:], row_sizes=[[4, 1]], col_sizes=[[3, 1, 2]])
    yield of("empty_blocks", row_sizes=[[0, 5], [5, 0]], col_sizes=[[6, 0, 0], [0, 2, 4]])
    yield of("every_block", mask=[[[1, 1, 1]] * 2] * 2)
    yield of("no_block", mask=[[[0, 0, 0]] * 2] * 2)
    yield of("no_queries", row_sizes=[[0, 0], [0, 0]])
    yield of("no_keys", col_sizes=[[0, 0, 0], [0, 0, 0]])
    yield of("strided", view=_strided)
    yield of("strided_nhd_bfloat16", "bfloat16", view=_strided, layout="NHD")
    yield of(
        "nan_outside_the_blocks",
        edit=lambda x: {n: t if n == "query" else with_value(t, (1, 0, 0), NAN) for n, t in x.items()},
    )
    yield of("nan_inside_a_block", edit=lambda x: x | {"value": with_value(x["value"], (0, 0, 2), NAN)})
    yield of("alias_sparse", call="attention.sparse")


CASES = {"attention.sparse.block": _block, "attention.sparse.variable_block": _variable}


def check() -> None:
    """A mask that keeps everything is dense attention."""
    draw = Draw("sparse", "check")
    q, k, v = (draw.floats("float64", *s).values for s in ((4, 4, 4), (6, 2, 4), (6, 2, 4)))
    got = masked(q, k, v, np.ones((2, 4, 6), dtype=bool))
    assert np.allclose(got, dense(q[None], k[None], v[None], causal=False)[0], rtol=1e-14)
