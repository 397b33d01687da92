"""Normalization over the last dimension."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .case import NAN, Case, Draw, Expected, Tensor, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS, dot, total


def rms(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    return _by_row(x, weight, None, lambda row: row / math.sqrt(dot(row, row) / len(row) + eps))


def layer(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> np.ndarray:
    def normal(row: np.ndarray) -> np.ndarray:
        centred = row - total(row) / len(row)
        return centred / math.sqrt(dot(centred, centred) / len(row) + eps)

    return _by_row(x, weight, bias, normal)


def _by_row(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, normal: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    if x.size == 0:
        return x.copy()
    out = np.array([normal(row) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


EPS = {"norm.rms": 1e-6, "norm.layer": 1e-5, "norm.fused_add_rms": 1e-6}
TENSORS = {
    "norm.rms": ["weight"],
    "norm.layer": ["weight", "bias"],
    "norm.fused_add_rms": ["residual", "weight"],
}
ALIAS = {"norm.rms": "rms_norm", "norm.layer": "layer_norm", "norm.fused_add_rms": "fused_add_rms_norm"}


def _case(
    op: str,
    name: str,
    dtype: str = "float32",
    shape: tuple[int, ...] = (3, 5),
    *,
    drop: tuple[str, ...] = (),
    weights: str | None = None,
    full_precision: bool = False,
    edit: Any = None,
    view: Any = None,
    call: str | None = None,
    **params: Any,
) -> Case:
    draw = Draw(op, name)
    fill = draw.floats if full_precision else draw.coarse
    inputs: dict[str, Tensor] = {"input": fill(dtype, *shape)}
    for extra in TENSORS[op]:
        if extra not in drop:
            inputs[extra] = fill(dtype, *shape) if extra == "residual" else fill(weights or dtype, shape[-1])
    inputs = edit(inputs) if edit else inputs
    x = {n: t.values for n, t in inputs.items()}
    eps = params.get("eps", EPS[op])
    if op == "norm.fused_add_rms":
        added = x["input"] + x["residual"]
        expect = {
            "output": Expected(dtype, rms(added, x.get("weight"), eps)),
            "residual_out": Expected(dtype, added),
        }
    elif op == "norm.rms":
        expect = {"output": Expected(dtype, rms(x["input"], x.get("weight"), eps))}
    else:
        expect = {"output": Expected(dtype, layer(x["input"], x.get("weight"), x.get("bias"), eps))}
    inputs = view(inputs) if view else inputs
    return Case(name, call or op, inputs, expect, params)


VIEWS = {
    "input": lambda t: transposed(t, 0, 1),
    "residual": padded_rows,
    "weight": every_other,
    "bias": padded_rows,
}


def _cases(op: str) -> Iterator[Case]:
    for dtype in FLOATS:
        yield _case(op, dtype, dtype, full_precision=True)
        yield _case(op, f"{dtype}_rank_3_no_weight", dtype, (2, 2, 4), drop=("weight", "bias"))
    yield _case(op, "bfloat16_with_float32_weight", "bfloat16", weights="float32", full_precision=True)
    yield _case(op, "float16_with_float32_weight", "float16", weights="float32", full_precision=True)
    yield _case(op, "float32_with_bfloat16_weight", weights="bfloat16")
    yield _case(op, "float32_with_float64_weight", weights="float64", full_precision=True)
    if op == "norm.layer":
        yield _case(op, "weight_without_bias", drop=("bias",))
        yield _case(op, "bias_without_weight", drop=("weight",))
        # The mean is much larger than the spread, which a difference of squares would not survive.
        yield _case(
            op, "far_from_zero", shape=(2, 8), edit=lambda x: x | {"input": tensor("float32", x["input"].values + 100)}
        )
    yield _case(op, "eps", eps=0.5)
    yield _case(op, "eps_zero", eps=0.0)
    yield _case(
        op,
        "row_of_zeros",
        edit=lambda x: {
            n: tensor("float32", t.values * np.array([[1], [0], [1]])) if t.values.ndim == 2 else t
            for n, t in x.items()
        },
    )
    yield _case(op, "one_row", shape=(1, 5))
    yield _case(op, "one_column", shape=(3, 1))
    yield _case(op, "rank_1", shape=(6,))
    yield _case(op, "rank_4", "float16", shape=(1, 2, 2, 3))
    yield _case(op, "no_rows", shape=(0, 4))
    yield _case(op, "no_rows_rank_3", shape=(2, 0, 4))
    yield _case(op, "no_columns", shape=(2, 0))
    yield _case(op, "nan_stays_in_its_row", edit=lambda x: x | {"input": with_value(x["input"], (1, 2), NAN)})
    yield _case(op, "nan_weight", edit=lambda x: x | {"weight": with_value(x["weight"], (2,), NAN)})
    yield _case(op, "strided", view=lambda x: {n: VIEWS[n](t) for n, t in x.items()})
    yield _case(op, "input_gaps_bfloat16", "bfloat16", view=lambda x: x | {"input": every_other(x["input"])})
    yield _case(op, "alias", call=ALIAS[op])


CASES = {op: (lambda op=op: _cases(op)) for op in TENSORS}


def check() -> None:
    x = Draw("norm").floats("float64", 3, 8).values
    flat = layer(x, None, None, 0.0)
    assert np.allclose(flat.mean(-1), 0, atol=1e-14) and np.allclose(flat.var(-1), 1)
    assert np.allclose((rms(x, None, 0.0) ** 2).mean(-1), 1)
    assert np.allclose(rms(x - x.mean(-1, keepdims=True), None, 1e-3), layer(x, None, None, 1e-3))
