"""Activations."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import NAN, Case, Draw, Expected, Tensor, every_other, padded_rows, tensor, transposed, with_value
from .number import FLOATS, exp, normal_cdf, tanh

ROOT_2_OVER_PI = 0.7978845608028654


def silu(x: float) -> float:
    return x / (1 + exp(-x))


def gelu(x: float) -> float:
    return x * normal_cdf(x)


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + tanh(ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)))


def relu(x: float) -> float:
    return max(x, 0.0)


def each(f: Any, x: np.ndarray) -> np.ndarray:
    return np.array([f(float(v)) for v in x.ravel()]).reshape(x.shape)


SILU_MUL, GELU, SOFTMAX = "activation.silu_mul", "activation.gelu", "activation.softmax"


def _silu_mul(name: str, gate: Tensor, up: Tensor, call: str = SILU_MUL) -> Case:
    out = each(silu, gate.values) * up.values
    return Case(name, call, {"gate": gate, "up": up}, {"output": Expected(gate.dtype, out)})


def _silu_muls() -> Iterator[Case]:
    for dtype in FLOATS:
        draw = Draw(SILU_MUL, dtype)
        yield _silu_mul(dtype, draw.floats(dtype, 3, 5, bound=6.0), draw.floats(dtype, 3, 5))
        # Far out, exp overflows or vanishes; the result is 0 or the gate itself.
        far = tensor(dtype, [-1000.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1000.0])
        yield _silu_mul(f"{dtype}_far_out", far, tensor(dtype, [1.0, 0.5, 1.0, 2.0, 0.5, 0.25, 0.125]))
    draw = Draw(SILU_MUL, "edges")
    a, b = draw.coarse("float32", 3, 4, bound=4.0), draw.coarse("float32", 3, 4)
    yield _silu_mul("nan_gate", with_value(a, (1, 2), NAN), b)
    yield _silu_mul("nan_up", a, with_value(b, (0, 0), NAN))
    yield _silu_mul("rank_1", tensor("float32", a.values[0]), tensor("float32", b.values[0]))
    yield _silu_mul("rank_3", draw.coarse("float16", 2, 2, 3), draw.coarse("float16", 2, 2, 3))
    yield _silu_mul("no_rows", tensor("float32", np.zeros((0, 4))), tensor("float32", np.zeros((0, 4))))
    yield _silu_mul("no_columns", tensor("float32", np.zeros((3, 0))), tensor("float32", np.zeros((3, 0))))
    yield _silu_mul("gate_transposed_up_gaps", transposed(a, 0, 1), every_other(b))
    both = np.concatenate([a.values, b.values], 1)
    first, second = (Tensor("float32", part.values, both.ravel(), (8, 1), at) for part, at in ((a, 0), (b, 4)))
    yield _silu_mul("halves_of_one_buffer", first, second)
    yield _silu_mul("up_padded_bfloat16", tensor("bfloat16", a.values), padded_rows(tensor("bfloat16", b.values)))
    yield _silu_mul("alias_silu_mul", a, b, "silu_mul")


def _gelu(name: str, x: Tensor, approximate: str | None = None, call: str = GELU) -> Case:
    out = each(gelu_tanh if approximate == "tanh" else gelu, x.values)
    params = {} if approximate is None else {"approximate": approximate}
    return Case(name, call, {"input": x}, {"output": Expected(x.dtype, out)}, params)


def _gelus() -> Iterator[Case]:
    for dtype in FLOATS:
        x = Draw(GELU, dtype).floats(dtype, 3, 5, bound=5.0)
        far = tensor(dtype, [-100.0, -8.0, -6.0, -4.0, -1.0, -0.0078125, 0.0, 0.5, 2.0, 6.0, 100.0])
        for approximate in ("none", "tanh"):
            yield _gelu(f"{dtype}_{approximate}", x, approximate)
            yield _gelu(f"{dtype}_{approximate}_far_out", far, approximate)
    x = Draw(GELU, "edges").coarse("float32", 3, 4, bound=4.0)
    yield _gelu("default_is_none", x)
    yield _gelu("nan_none", with_value(x, (1, 2), NAN), "none")
    yield _gelu("nan_tanh", with_value(x, (1, 2), NAN), "tanh")
    yield _gelu("rank_1", tensor("float32", x.values[0]), "tanh")
    yield _gelu("rank_3", Draw(GELU, "rank_3").coarse("float16", 2, 2, 3))
    yield _gelu("no_rows", tensor("float32", np.zeros((0, 4))), "tanh")
    yield _gelu("no_columns", tensor("float32", np.zeros((2, 0))))
    yield _gelu("transposed", transposed(x, 0, 1))
    yield _gelu("gaps", every_other(x), "tanh")
    yield _gelu("padded_bfloat16", padded_rows(tensor("bfloat16", x.values)))
    yield _gelu("alias_gelu", x, call="gelu")


def softmax(x: np.ndarray) -> np.ndarray:
    """Each row: e^(x - its largest), over their sum."""
    out = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        weights = [exp(float(v) - max(x[row])) for v in x[row]]
        out[row] = [weight / sum(weights) for weight in weights]
    return out


def _softmax(name: str, x: Tensor, call: str = SOFTMAX, spoiled: int | None = None) -> Case:
    out = softmax(x.values)
    if spoiled is not None:
        out[spoiled] = NAN
    return Case(name, call, {"input": x}, {"output": Expected(x.dtype, out)})


def _softmaxes() -> Iterator[Case]:
    for dtype in FLOATS:
        draw = Draw(SOFTMAX, dtype)
        yield _softmax(dtype, draw.floats(dtype, 3, 5, bound=5.0))
        # Numbers whose exponentials are too large for the dtype, and differences whose exponentials are too small.
        yield _softmax(f"{dtype}_large", tensor(dtype, [[10000.0, 10008.0, -10000.0], [-10000.0, -10008.0, -10000.0]]))
    x = Draw(SOFTMAX, "edges").coarse("float32", 3, 4, bound=4.0)
    yield _softmax("nan_spreads_in_its_row", with_value(x, (1, 2), NAN), spoiled=1)
    yield _softmax("one_column", tensor("float32", x.values[:, :1]))
    yield _softmax("rank_1", tensor("float32", x.values[0]))
    yield _softmax("rank_3", Draw(SOFTMAX, "rank_3").coarse("float16", 2, 2, 3))
    yield _softmax("no_rows", tensor("float32", np.zeros((0, 4))))
    yield _softmax("no_columns", tensor("float32", np.zeros((2, 0))))
    yield _softmax("transposed", transposed(x, 0, 1))
    yield _softmax("gaps", every_other(x))
    yield _softmax("padded_bfloat16", padded_rows(tensor("bfloat16", x.values)))
    yield _softmax("alias_softmax", x, "softmax")


CASES = {SILU_MUL: _silu_muls, GELU: _gelus, SOFTMAX: _softmaxes}


def check() -> None:
    assert abs(ROOT_2_OVER_PI**2 - 2 / np.pi) < 1e-15
    for x in np.linspace(-6, 6, 61):
        assert abs(gelu(x) - gelu_tanh(x)) < 1e-3
        assert abs(silu(x) - silu(-x) - x) < 1e-14 and abs(gelu(x) - gelu(-x) - x) < 1e-14
        assert abs(gelu_tanh(x) - gelu_tanh(-x) - x) < 1e-14
