"""Tensors, views of them, and test cases, as they are written to the files."""

import json
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .number import is_float, rounded_array

NAN = math.nan
INF = math.inf


@dataclass(frozen=True)
class Tensor:
    """An input: its values in logical order, and the buffer they lie in when that is not row-major."""

    dtype: str
    values: np.ndarray
    buffer: np.ndarray | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def to_json(self) -> dict[str, Any]:
        if self.buffer is None:
            return {"dtype": self.dtype, "shape": list(self.shape), "data": numbers(self.dtype, self.values)}
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "offset": self.offset,
            "data": numbers(self.dtype, self.buffer),
        }


def numbers(dtype: str, values: np.ndarray) -> list[Any]:
    """Integers as integers; floats as floats, with names for what JSON has no number for."""
    flat = np.asarray(values).ravel()
    if not is_float(dtype):
        return [int(x) for x in flat]
    return [float(x) if math.isfinite(x) else {"nan": "nan", "inf": "inf", "-inf": "-inf"}[str(float(x))] for x in flat]


def tensor(dtype: str, values: Any) -> Tensor:
    """A contiguous tensor of the given values, rounded to the dtype."""
    if is_float(dtype):
        return Tensor(dtype, rounded_array(dtype, np.asarray(values, dtype=np.float64)))
    return Tensor(dtype, np.asarray(values, dtype=np.int64))


def with_value(t: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    """The same tensor with one element replaced."""
    values = t.values.copy()
    values[at] = value
    return tensor(t.dtype, values)


def _filler(dtype: str) -> float:
    """What lies between the elements of a view: it must never be read."""
    return NAN if is_float(dtype) else (1 if dtype == "bool" else 7)


def transposed(t: Tensor, a: int, b: int) -> Tensor:
    """The same values, stored with the axes `a` and `b` swapped."""
    stored = t.values.swapaxes(a, b)
    strides = list(_row_major(stored.shape))
    strides[a], strides[b] = strides[b], strides[a]
    return Tensor(t.dtype, t.values, stored.ravel(), tuple(strides), 0)


def every_other(t: Tensor) -> Tensor:
    """The same values, stored with a gap after every element."""
    buffer = np.full(2 * t.values.size, _filler(t.dtype), dtype=t.values.dtype)
    buffer[::2] = t.values.ravel()
    return Tensor(t.dtype, t.values, buffer, tuple(2 * s for s in _row_major(t.shape)), 0)


def padded_rows(t: Tensor, offset: int = 3, gap: int = 2) -> Tensor:
    """The same values, stored behind an offset and with a gap after every row of the last axis."""
    rows = t.values.reshape(-1, t.shape[-1])
    wide = np.full((rows.shape[0], rows.shape[1] + gap), _filler(t.dtype), dtype=t.values.dtype)
    wide[:, : rows.shape[1]] = rows
    buffer = np.concatenate([np.full(offset, _filler(t.dtype), dtype=t.values.dtype), wide.ravel()])
    strides = _row_major((*t.shape[:-1], t.shape[-1] + gap))
    return Tensor(t.dtype, t.values, buffer, strides, offset)


def expanded(t: Tensor, axis: int, size: int) -> Tensor:
    """The tensor repeated along an axis of size 1, with stride 0 there."""
    strides = list(_row_major(t.shape))
    strides[axis] = 0
    return Tensor(t.dtype, np.repeat(t.values, size, axis), t.values.ravel(), tuple(strides), 0)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Expected:
    """An output in float64, in logical order; `exact` when nothing but these values is right."""

    dtype: str
    values: np.ndarray
    exact: bool = False

    def to_json(self) -> dict[str, Any]:
        body = {"dtype": self.dtype, "shape": list(self.values.shape), "data": numbers(self.dtype, self.values)}
        return body | {"exact": True} if self.exact else body


@dataclass(frozen=True)
class Case:
    """One call, and what it gives or the error it is."""

    name: str
    call: str
    inputs: dict[str, Tensor]
    expect: dict[str, Expected] | None = None
    params: dict[str, Any] | None = None
    layout: str | None = None
    error: str | None = None

    def to_json(self) -> str:
        body: dict[str, Any] = {
            "name": self.name,
            "call": self.call,
            "layout": self.layout,
            "inputs": {name: t.to_json() for name, t in self.inputs.items()},
            "params": self.params or {},
        }
        if self.error is not None:
            assert self.expect is None
            body["error"] = self.error
        else:
            assert self.expect is not None
            body["expect"] = {name: e.to_json() for name, e in self.expect.items()}
        return json.dumps(body, allow_nan=False, separators=(",", ":"))


def bad_data(
    name: str, op: str, inputs: dict[str, Tensor], params: dict[str, Any] | None = None, layout: str | None = None
) -> Case:
    """A call that is well-formed but whose values are not."""
    return Case(name, op, inputs, params=params, layout=layout, error="BadData")


class Draw:
    """Random numbers of one case: a function of its name alone, so cases do not disturb each other."""

    def __init__(self, *name: object) -> None:
        self.rng = np.random.default_rng(zlib.crc32("/".join(map(str, name)).encode()))

    def floats(self, dtype: str, *shape: int, bound: float = 1.5) -> Tensor:
        """Values that use the dtype's full precision."""
        return tensor(dtype, (2 * self.rng.random(shape) - 1) * bound)

    def coarse(self, dtype: str, *shape: int, bound: float = 1.5) -> Tensor:
        """Multiples of 1/8: short to write, and exact in all but the narrowest dtypes."""
        return tensor(dtype, self.rng.integers(-int(bound * 8), int(bound * 8) + 1, shape) / 8)

    def bools(self, *shape: int, chance: float = 0.6) -> Tensor:
        return tensor("bool", self.rng.random(shape) < chance)

    def ints(self, dtype: str, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to below `high`."""
        return tensor(dtype, self.rng.integers(low, high, shape))

    def permutation(self, n: int) -> list[int]:
        return [int(i) for i in self.rng.permutation(n)]
