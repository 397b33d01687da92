"""Positional encodings."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import (
    NAN,
    Case,
    Draw,
    Expected,
    Tensor,
    bad_data,
    every_other,
    expanded,
    padded_rows,
    tensor,
    transposed,
    with_value,
)
from .number import FLOATS


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, interleaved: bool) -> np.ndarray:
    """BSHD, with a position for every batch and place."""
    dim, columns = x.shape[3], cos.shape[1]
    pairs = dim // 2 if columns == dim else columns
    out = x.copy()
    for b, s in np.ndindex(x.shape[:2]):
        for i in range(pairs):
            c, d = cos[positions[b, s], i], sin[positions[b, s], i]
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
            out[b, s, :, one] = x[b, s, :, one] * c - x[b, s, :, two] * d
            out[b, s, :, two] = x[b, s, :, two] * c + x[b, s, :, one] * d
    return out


def tables(dtype: str, length: int, columns: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a usual schedule, on a grid of 1/256 so that libm's last bit does not show."""
    angles = [[p / 10 ** (i / 2) for i in range(columns)] for p in range(length)]
    cos, sin = ([[round(f(a) * 256) / 256 for a in row] for row in angles] for f in (math.cos, math.sin))
    return tensor(dtype, np.reshape(cos, (length, columns))), tensor(dtype, np.reshape(sin, (length, columns)))


ROPE = "posenc.rope"


def _rope(
    name: str,
    dtype: str = "float32",
    table: str | None = None,
    *,
    shape: tuple[int, int, int, int] = (1, 3, 2, 4),
    layout: str | None = "BSHD",
    columns: int | None = None,
    length: int = 5,
    positions: Tensor | None = None,
    call: str = ROPE,
    full_precision: bool = False,
    tail: str = "",
    edit: Any = None,
    view: Any = None,
    error: bool = False,
    **params: Any,
) -> Case:
    """`shape` is batch, sequence, heads, head dimension. `tail` says what fills the second half of full tables."""
    draw = Draw(ROPE, name)
    x = (draw.floats if full_precision else draw.coarse)(dtype, *shape)
    x = edit(x) if edit else x
    cos, sin = tables(table or dtype, length, shape[3] // 2 if columns is None else columns)
    if tail:
        second = {"repeated": (cos.values, sin.values), "garbage": (cos.values * NAN, sin.values * 0 + 9.0)}[tail]
        cos, sin = (tensor(t.dtype, np.concatenate([t.values, e], 1)) for t, e in zip((cos, sin), second, strict=True))
    inputs = {"input": x, "cos": cos, "sin": sin}
    if positions is not None:
        inputs["positions"] = positions
    at = np.arange(shape[1]) if positions is None else positions.values
    if error:
        return bad_data(name, ROPE, inputs, params, layout)
    out = rotate(x.values, cos.values, sin.values, np.broadcast_to(at, shape[:2]), params.get("interleaved", False))
    if layout == "BHSD":
        inputs["input"], out = tensor(dtype, x.values.swapaxes(1, 2)), out.swapaxes(1, 2)
    if layout == "NHD":
        inputs["input"], out = tensor(dtype, x.values[0]), out[0]
    inputs = view(inputs) if view else inputs
    return Case(name, call, inputs, {"output": Expected(dtype, out)}, params, layout)


def _ropes() -> Iterator[Case]:
    two: tuple[int, int, int, int] = (2, 3, 2, 4)
    for dtype in FLOATS:
        yield _rope(dtype, dtype, shape=two, full_precision=True)
        yield _rope(f"{dtype}_bhsd_interleaved", dtype, shape=two, layout="BHSD", interleaved=True)
        yield _rope(f"{dtype}_nhd_full_tables", dtype, layout="NHD", tail="repeated")
    yield _rope("bfloat16_with_float32_tables", "bfloat16", "float32")
    yield _rope("float16_with_float64_tables", "float16", "float64", interleaved=True)
    yield _rope("float32_with_bfloat16_tables", "float32", "bfloat16")
    yield _rope("default_layout", layout=None)
    yield _rope("full_tables_second_half_unused", tail="garbage")
    yield _rope("full_tables_interleaved", tail="repeated", interleaved=True)
    yield _rope("full_tables_interleaved_second_half_unused", tail="garbage", interleaved=True, layout="BHSD")
    yield _rope("partial", shape=(1, 3, 2, 8), columns=2)
    yield _rope("partial_interleaved", shape=(1, 3, 2, 8), columns=2, interleaved=True)
    yield _rope("partial_nhd", shape=(1, 3, 2, 8), columns=3, layout="NHD")
    yield _rope("partial_odd_head", shape=(1, 3, 2, 7), columns=3)
    yield _rope("no_columns", shape=(1, 3, 2, 4), columns=0)
    yield _rope("exact_table", length=3)
    yield _rope("positions_of_all", shape=two, positions=tensor("int64", [3, 0, 4]))
    yield _rope("positions_of_each", shape=two, positions=tensor("int32", [[3, 0, 4], [1, 1, 2]]))
    yield _rope("positions_broadcast", shape=two, positions=tensor("int64", [[2, 3, 4]]), layout="BHSD")
    yield _rope("positions_nhd", layout="NHD", positions=tensor("int32", [3, 4, 0]))
    yield _rope("positions_expanded_view", shape=two, positions=expanded(tensor("int64", [[3, 2, 4]]), 0, 2))
    yield _rope(
        "positions_gaps", shape=two, positions=every_other(tensor("int64", [[3, 0, 4], [1, 1, 2]])), interleaved=True
    )
    yield _rope("no_positions", shape=(1, 0, 2, 4))
    yield _rope("no_batch", shape=(0, 3, 2, 4))
    yield _rope("no_heads", shape=(1, 3, 0, 4))
    yield _rope("nan_stays_in_its_pair", edit=lambda x: with_value(x, (0, 1, 0, 1), NAN))
    yield _rope("input_transposed", view=lambda x: x | {"input": transposed(x["input"], 1, 2)})
    yield _rope(
        "input_gaps_tables_transposed",
        "bfloat16",
        view=lambda x: {
            "input": every_other(x["input"]),
            "cos": transposed(x["cos"], 0, 1),
            "sin": padded_rows(x["sin"]),
        },
    )
    yield _rope("alias_rope", call="rope")
    yield _rope("error_position_beyond_the_table", positions=tensor("int64", [0, 5, 1]), error=True)
    yield _rope("error_negative_position", positions=tensor("int32", [0, -1, 1]), error=True)
    yield _rope("error_sequence_longer_than_the_table", length=2, error=True)


ALIBI = "posenc.alibi"


def biases(slopes: np.ndarray, seq_q: int, seq_k: int) -> np.ndarray:
    distance = np.abs(np.arange(seq_q)[:, None] + seq_k - seq_q - np.arange(seq_k)[None, :])
    return np.asarray(-slopes[:, None, None] * distance[None])


def _alibi(name: str, slopes: Tensor, seq_q: int, seq_k: int, call: str = ALIBI) -> Case:
    out = biases(slopes.values, seq_q, seq_k)
    return Case(
        name, call, {"slopes": slopes}, {"output": Expected(slopes.dtype, out)}, {"seq_q": seq_q, "seq_k": seq_k}
    )


def _alibis() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _alibi(dtype, Draw(ALIBI, dtype).floats(dtype, 2, bound=1.0), 3, 4)
    slopes = tensor("float32", [0.5, 0.25, 0.125])
    yield _alibi("square", slopes, 4, 4)
    yield _alibi("more_queries", slopes, 5, 2)
    yield _alibi("one_query", slopes, 1, 6)
    yield _alibi("no_queries", slopes, 0, 3)
    yield _alibi("no_keys", slopes, 3, 0)
    yield _alibi("no_heads", tensor("float32", np.zeros(0)), 2, 3)
    yield _alibi("slopes_gaps", every_other(slopes), 2, 3)
    yield _alibi("slope_nan", tensor("float32", [0.5, NAN]), 2, 3)
    yield _alibi("alias_alibi_bias", slopes, 2, 2, "alibi_bias")


CASES = {ROPE: _ropes, ALIBI: _alibis}


def check() -> None:
    """A rotation is a product of complex numbers, and keeps lengths."""
    x = Draw("rope").floats("float64", 1, 3, 2, 4).values
    angles = np.arange(6).reshape(3, 2) / 5
    cos, sin = np.cos(angles), np.sin(angles)
    at = np.arange(3)[None]
    turn = np.exp(1j * angles)[None, :, None]
    halves = (x[..., :2] + 1j * x[..., 2:]) * turn
    assert np.allclose(rotate(x, cos, sin, at, False), np.concatenate([halves.real, halves.imag], -1), rtol=1e-13)
    neighbours = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    got = rotate(x, cos, sin, at, True)
    assert np.allclose(got, np.stack([neighbours.real, neighbours.imag], -1).reshape(x.shape), rtol=1e-13)
    assert np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1))
