"""Matrix products and feed-forward blocks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .activation import each, gelu, gelu_tanh, relu, silu
from .case import NAN, Case, Draw, Expected, Tensor, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS, dot

LINEAR, LINEAR_PACKED, FUSED = "mlp.linear", "mlp.linear.packed", "mlp.fused"
LINEAR_QUANTIZED = "mlp.linear.quantized"


def product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x . weight^T + bias over the last axis."""
    rows = x.reshape(-1, x.shape[-1]) if x.size else np.zeros((int(np.prod(x.shape[:-1])), x.shape[-1]))
    out = np.array([[dot(row, w) for w in weight] for row in rows]).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class Drawn(NamedTuple):
    """A product of drawn operands."""

    inputs: dict[str, Tensor]
    dtype: str
    output: np.ndarray

    @staticmethod
    def of(
        draw: Draw,
        dtype: str = "float32",
        rows: tuple[int, ...] = (3,),
        k: int = 5,
        n: int = 4,
        *,
        bias: bool = True,
        full_precision: bool = False,
        edit: Any = None,
    ) -> "Drawn":
        fill = draw.floats if full_precision else draw.coarse
        inputs: dict[str, Tensor] = {"input": fill(dtype, *rows, k), "weight": fill(dtype, n, k)}
        if bias:
            inputs["bias"] = fill(dtype, n)
        inputs = edit(inputs) if edit else inputs
        x = {name: t.values for name, t in inputs.items()}
        return Drawn(inputs, dtype, product(x["input"], x["weight"], x.get("bias")))


def _linear(name: str, *sizes: Any, view: Any = None, call: str = LINEAR, **more: Any) -> Case:
    """A case. `sizes` and `more` are as :meth:`Drawn.of` takes them."""
    inputs, dtype, out = Drawn.of(Draw(LINEAR, name), *sizes, **more)
    return Case(name, call, view(inputs) if view else inputs, {"output": Expected(dtype, out)})


VIEWS = {
    "input": lambda t: transposed(t, 0, 1),
    "weight": every_other,
    "bias": padded_rows,
    "up_weight": lambda t: transposed(t, 0, 1),
    "down_weight": every_other,
    "gate_weight": padded_rows,
}


def _view(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: VIEWS[n](t) for n, t in inputs.items()}


def _linears() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _linear(dtype, dtype, full_precision=True)
        yield _linear(f"{dtype}_rank_3_no_bias", dtype, (2, 2), 8, 3, bias=False)
    yield _linear("rank_1", rows=())
    yield _linear("one_by_one", rows=(1,), k=1, n=1)
    yield _linear("many_rows", rows=(7,), k=3, n=2)
    yield _linear("no_rows", rows=(0,))
    yield _linear("no_rows_rank_3", rows=(2, 0), bias=False)
    yield _linear("no_inputs_leave_the_bias", k=0)
    yield _linear("no_inputs_no_bias", k=0, bias=False)
    yield _linear("no_outputs", n=0)
    yield _linear("strided", view=_view)
    yield _linear(
        "weight_transposed_bfloat16", "bfloat16", view=lambda x: x | {"weight": transposed(x["weight"], 0, 1)}
    )
    yield _linear("nan_input_stays_in_its_row", edit=lambda x: x | {"input": with_value(x["input"], (1, 2), NAN)})
    yield _linear("nan_weight_stays_in_its_column", edit=lambda x: x | {"weight": with_value(x["weight"], (2, 0), NAN)})
    yield _linear("nan_bias", edit=lambda x: x | {"bias": with_value(x["bias"], (0,), NAN)})
    yield _linear("alias_linear", call="linear")


def packed(weight: Tensor, interleave: int) -> Tensor:
    """A weight in blocks of 32 outputs, `interleave` inputs side by side; zeros pad the last ones."""
    n, k = weight.shape
    groups = k if interleave == 1 else -(-k // (16 * interleave)) * 16
    blocks = np.zeros((-(-n // 32), groups, 32, interleave))
    for row in range(n):
        for column in range(k):
            blocks[row // 32, column // interleave, row % 32, column % interleave] = weight.values[row, column]
    return tensor(weight.dtype, blocks)


def _packed(
    name: str,
    *sizes: Any,
    view: Any = None,
    call: str = LINEAR_PACKED,
    interleave: int | None = None,
    activation: str | None = None,
    **more: Any,
) -> Case:
    """A case. `sizes` and `more` are as :meth:`Drawn.of` takes them."""
    inputs, dtype, out = Drawn.of(Draw(LINEAR_PACKED, name), *sizes, **more)
    params: dict[str, Any] = {}
    if activation is not None:
        params["activation"] = activation
        out = each(PACKED_ACTIVATIONS[activation], out)
    side_by_side = interleave or (2 if dtype == "bfloat16" else 1)
    if interleave or side_by_side > 1:
        params["interleave"] = side_by_side
    params["out_features"] = inputs["weight"].shape[0]
    inputs = inputs | {"weight": packed(inputs["weight"], side_by_side)}
    return Case(name, call, view(inputs) if view else inputs, {"output": Expected(dtype, out)}, params)


PACKED_ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def _packeds() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _packed(dtype, dtype, full_precision=True)
        yield _packed(f"{dtype}_rank_3_no_bias", dtype, (2, 2), 8, 3, bias=False)
        for activation in PACKED_ACTIVATIONS:
            yield _packed(f"{dtype}_{activation}", dtype, activation=activation)
    yield _packed("rank_1", rows=())
    yield _packed("two_blocks", k=3, n=33)
    yield _packed("many_rows", rows=(13,), k=3, n=2)
    yield _packed("many_rows_float16", "float16", (9,), 3, 2)
    yield _packed("many_rows_float16_rank_3", "float16", (2, 4), 8, 3)
    yield _packed("many_rows_float16_no_bias", "float16", (8,), 5, 4, bias=False)
    yield _packed("no_rows", rows=(0,))
    yield _packed("no_inputs_leave_the_bias", k=0)
    yield _packed("no_outputs", n=0)
    yield _packed("pairs_of_float32", interleave=2)
    yield _packed("fours_of_float32", interleave=4, activation="relu")
    yield _packed("single_bfloat16", "bfloat16", interleave=1)
    yield _packed(
        "strided", view=lambda x: x | {"input": transposed(x["input"], 0, 1), "weight": every_other(x["weight"])}
    )
    yield _packed("nan_input_stays_in_its_row", edit=lambda x: x | {"input": with_value(x["input"], (1, 2), NAN)})
    yield _packed("nan_weight_stays_in_its_column", edit=lambda x: x | {"weight": with_value(x["weight"], (2, 0), NAN)})
    yield _packed("alias_linear_packed", call="linear_packed")


class Kind(NamedTuple):
    """How a weight of integers is stored."""

    dtype: str
    interleave: int
    #: Its integers go from `-most - 1` to `most`.
    most: int
    #: Integers of a number.
    each: int


INT8, INT4 = Kind("int8", 1, 127, 1), Kind("uint8", 4, 7, 2)


def _stored(integers: np.ndarray, kind: Kind) -> Tensor:
    """Integers in blocks of 32 outputs; zeros pad them."""
    (n, k), features = integers.shape, kind.interleave * kind.each
    groups = k if features == 1 else -(-k // (16 * features)) * 16
    blocks = np.zeros((-(-n // 32), groups, 32, kind.interleave), dtype=np.int64)
    for row in range(n):
        for column in range(k):
            number, half = divmod(column, kind.each)
            place = row // 32, number // kind.interleave, row % 32, number % kind.interleave
            # Two's complement: of all bits, or of the lower or the upper four.
            value = integers[row, column]
            blocks[place] += value if kind.each == 1 else (value % 16) << 4 * half
    return tensor(kind.dtype, blocks)


def _quantized(
    name: str,
    kind: Kind = INT8,
    dtype: str = "float32",
    rows: tuple[int, ...] = (3,),
    k: int = 5,
    n: int = 4,
    *,
    group: int = 0,
    bias: bool = True,
    activation: str | None = None,
    view: Any = None,
    edit: Any = None,
    call: str = LINEAR_QUANTIZED,
) -> Case:
    draw = Draw(LINEAR_QUANTIZED, name)
    count = -(-k // group) if group else 1
    integers = draw.ints("int64", -kind.most - 1, kind.most + 1, n, k).values
    scales = np.abs(draw.coarse("float32", n, count).values) / kind.most
    laid = np.zeros((-(-n // 32), count, 32))
    for row in range(n):
        laid[row // 32, :, row % 32] = scales[row]
    inputs = {
        "input": draw.coarse(dtype, *rows, k),
        "weight": _stored(integers, kind),
        "scales": tensor("float32", laid),
    }
    if bias:
        inputs["bias"] = draw.coarse(dtype, n)
    inputs = edit(inputs) if edit else inputs
    scale = inputs["scales"].values
    weight = np.array(
        [
            [integers[row, column] * scale[row // 32, column // group if group else 0, row % 32] for column in range(k)]
            for row in range(n)
        ]
    ).reshape(n, k)
    out = product(inputs["input"].values, weight, inputs["bias"].values if bias else None)
    params: dict[str, Any] = {"out_features": n}
    if kind.interleave > 1:
        params["interleave"] = kind.interleave
    if group:
        params["group_size"] = group
    if activation is not None:
        params["activation"] = activation
        out = each(PACKED_ACTIVATIONS[activation], out)
    return Case(name, call, view(inputs) if view else inputs, {"output": Expected(dtype, out)}, params)


def _quantizeds() -> Iterator[Case]:
    for dtype in FLOATS:
        for of, kind in (("int8", INT8), ("int4", INT4)):
            yield _quantized(f"{dtype}_{of}", kind, dtype)
            yield _quantized(f"{dtype}_{of}_groups_rank_3_no_bias", kind, dtype, (2, 2), 33, 3, group=32, bias=False)
    for activation in PACKED_ACTIVATIONS:
        yield _quantized(f"int8_{activation}", activation=activation)
        yield _quantized(f"int4_bfloat16_{activation}", INT4, "bfloat16", activation=activation)
    yield _quantized("rank_1", rows=())
    yield _quantized("two_blocks", k=3, n=33)
    yield _quantized("two_blocks_int4", INT4, k=3, n=33)
    yield _quantized("many_rows", rows=(13,), k=3, n=2)
    yield _quantized("groups_of_three", k=7, group=3)
    yield _quantized("groups_of_three_int4", INT4, k=7, group=3)
    yield _quantized("no_rows", rows=(0,))
    yield _quantized("no_inputs_leave_the_bias", k=0)
    yield _quantized("no_outputs", n=0)
    yield _quantized(
        "strided", view=lambda x: x | {"input": transposed(x["input"], 0, 1), "weight": every_other(x["weight"])}
    )
    yield _quantized("nan_input_stays_in_its_row", edit=lambda x: x | {"input": with_value(x["input"], (1, 2), NAN)})
    yield _quantized(
        "nan_scale_stays_in_its_column", edit=lambda x: x | {"scales": with_value(x["scales"], (0, 0, 2), NAN)}
    )
    yield _quantized("alias_linear_quantized", call="linear_quantized")


ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu}


def fused(x: np.ndarray, up: np.ndarray, down: np.ndarray, gate: np.ndarray | None, activation: str) -> np.ndarray:
    act = ACTIVATIONS[activation]
    hidden = each(act, product(x, up)) if gate is None else each(act, product(x, gate)) * product(x, up)
    return product(hidden, down)


def _fused(
    name: str,
    dtype: str = "float32",
    rows: tuple[int, ...] = (2,),
    hidden: int = 4,
    inner: int = 6,
    *,
    gated: bool = True,
    full_precision: bool = False,
    edit: Any = None,
    view: Any = None,
    call: str = FUSED,
    **params: Any,
) -> Case:
    draw = Draw(FUSED, name)
    fill = draw.floats if full_precision else draw.coarse
    inputs: dict[str, Tensor] = {
        "input": fill(dtype, *rows, hidden),
        "up_weight": fill(dtype, inner, hidden, bound=0.75),
        "down_weight": fill(dtype, hidden, inner, bound=0.75),
    }
    if gated:
        inputs["gate_weight"] = fill(dtype, inner, hidden, bound=0.75)
    inputs = edit(inputs) if edit else inputs
    x = {n: t.values for n, t in inputs.items()}
    out = fused(x["input"], x["up_weight"], x["down_weight"], x.get("gate_weight"), params.get("activation", "silu"))
    return Case(name, call, view(inputs) if view else inputs, {"output": Expected(dtype, out)}, params)


def _fuseds() -> Iterator[Case]:
    for dtype in FLOATS:
        for activation in ACTIVATIONS:
            yield _fused(
                f"{dtype}_{activation}_gated", dtype, activation=activation, full_precision=activation == "silu"
            )
            yield _fused(f"{dtype}_{activation}", dtype, activation=activation, gated=False)
    yield _fused("default_is_silu")
    yield _fused("rank_1", rows=())
    yield _fused("rank_3", rows=(2, 1), gated=False, activation="gelu")
    yield _fused("no_rows", rows=(0,))
    yield _fused("no_intermediate", inner=0)
    yield _fused("no_hidden", hidden=0)
    yield _fused("strided", view=_view)
    yield _fused("strided_no_gate_bfloat16", "bfloat16", gated=False, view=_view)
    yield _fused("nan_stays_in_its_row", edit=lambda x: x | {"input": with_value(x["input"], (1, 0), NAN)})
    yield _fused("alias_fused_mlp", call="fused_mlp")


CASES = {LINEAR: _linears, LINEAR_PACKED: _packeds, LINEAR_QUANTIZED: _quantizeds, FUSED: _fuseds}


def check() -> None:
    draw = Draw("mlp")
    x, up, down, gate = (draw.floats("float64", *s).values for s in ((2, 3, 4), (6, 4), (4, 6), (6, 4)))
    assert np.allclose(product(x, up, np.ones(6)), x @ up.T + 1, rtol=1e-13)
    opened = x @ gate.T
    want = (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T
    assert np.allclose(fused(x, up, down, gate, "silu"), want, rtol=1e-12)
    assert np.allclose(fused(x, up, down, None, "relu"), np.maximum(x @ up.T, 0) @ down.T, rtol=1e-12)
