"""What the generated cases are made of: tensors of every dtype, laid out in memory in every way.

Hypothesis draws shapes, dtypes, layouts and parameters, which shrink well; the numbers come from one drawn seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]

SCALES = {"smoke": 0.05, "quick": 0.15, "full": 5.0}
"""How many cases: `smoke` while writing a kernel, `quick` in CI (300 a family), `full` overnight (10,000 a family)."""
SCALE = SCALES[os.environ.get("LZ_TEST_SCALE", "quick")]
LEAST_CASES = int(2000 * SCALE)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INDICES = (torch.int32, torch.int64)
WAYS = ("contiguous", "transposed", "stepped", "padded", "offset", "expanded")
"""How a tensor's elements may lie in memory."""
WRITABLE_WAYS = tuple(way for way in WAYS if way != "expanded")


def examples(count: int) -> Callable[[Any], Any]:
    """So many cases, scaled by LZ_TEST_SCALE."""
    return settings(max_examples=max(int(count * SCALE), 1))


floats = st.sampled_from(FLOATS)
indices = st.sampled_from(INDICES)
ways = st.sampled_from(WAYS)
writable_ways = st.sampled_from(WRITABLE_WAYS)
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from((None, None, 0.05, 0.3, 1.0, 0.0, -0.4))
softcaps = st.sampled_from((0.0, 0.0, 0.0, 1.5, 5.0, 30.0))


def sizes(most: int, *, empty: bool = True) -> st.SearchStrategy[int]:
    """Sizes of a dimension: small ones, now and then none."""
    return st.integers(0 if empty else 1, most)


def seldom(times_in: int = 12) -> st.SearchStrategy[bool]:
    """True once in so many cases."""
    return st.integers(0, times_in - 1).map(lambda n: n == times_in - 1)


def poison(dtype: torch.dtype) -> float | int | bool:
    """What lies between the elements of a view: reading it shows."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of nothing but poison."""
    return torch.full(shape, poison(dtype), dtype=torch.float32 if dtype in FP8 else dtype).to(dtype)


def laid(values: torch.Tensor, way: str, rng: np.random.Generator) -> torch.Tensor:
    """The same values lying in memory another way; `expanded` repeats the first slice of an axis."""
    rank = values.dim()
    if way == "transposed" and rank >= 2:
        a, b = (int(i) for i in rng.choice(rank, 2, replace=False))
        return values.transpose(a, b).contiguous().transpose(a, b)
    if way == "stepped" and rank >= 1:
        axis = int(rng.integers(rank))
        wide = filled(tuple(2 * n if i == axis else n for i, n in enumerate(values.shape)), values.dtype)
        view = wide[tuple(slice(int(rng.integers(2)), None, 2) if i == axis else slice(None) for i in range(rank))]
        view.copy_(values)
        return view
    if way == "padded" and rank >= 1:
        wide = filled((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
        view = wide[..., 1 : 1 + values.shape[-1]]
        view.copy_(values)
        return view
    if way == "offset":
        buffer = filled((values.numel() + 3,), values.dtype)
        view = buffer[1 : 1 + values.numel()].view(values.shape)
        view.copy_(values)
        return view
    if way == "expanded":
        axes = [i for i, n in enumerate(values.shape) if n > 1]
        if axes:
            axis = int(rng.choice(axes))
            return values.narrow(axis, 0, 1).contiguous().expand(values.shape)
    return values.contiguous()


def numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, bound: float = 1.5, coarse: bool = False
) -> torch.Tensor:
    """Values within the bound; `coarse` ones are multiples of 1/8, so that equal ones are common."""
    if coarse:
        drawn = rng.integers(-int(bound * 8), int(bound * 8) + 1, shape) / 8.0
    else:
        drawn = (2.0 * rng.random(shape) - 1.0) * bound
    return torch.from_numpy(np.asarray(drawn, dtype=np.float64)).to(dtype)


class Draw:
    """The numbers of one case, and how each tensor of it lies in memory."""

    def __init__(self, seed: int, all_ways: list[str]) -> None:
        self.rng = np.random.default_rng(seed)
        self._ways = all_ways
        self._next = 0

    def lay(self, values: torch.Tensor, writable: bool = False) -> torch.Tensor:
        """The tensor, lying as the case says for its place."""
        way = self._ways[self._next % len(self._ways)]
        self._next += 1
        return laid(values, "stepped" if writable and way == "expanded" else way, self.rng)

    def floats(self, *shape: int, dtype: torch.dtype, bound: float = 1.5, coarse: bool = False) -> torch.Tensor:
        """Values within the bound."""
        return self.lay(numbers(self.rng, shape, dtype, bound, coarse))

    def ints(self, values: Array | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Given integers."""
        return self.lay(torch.from_numpy(np.asarray(values, dtype=np.int64)).to(dtype))

    def ints_as_they_are(self, values: Array | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Given integers whose values must stay: never expanded."""
        tensor = torch.from_numpy(np.asarray(values, dtype=np.int64)).to(dtype)
        return self.lay(tensor, writable=True)


@st.composite
def draws(draw: st.DrawFn, tensors: int = 3) -> Draw:
    """Half of the cases lie in memory as plainly as can be, which is what most kernels are written for."""
    plain = draw(st.booleans())
    return Draw(draw(seeds), ["contiguous"] if plain else [draw(ways) for _ in range(tensors)])


def put_nan(tensor: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A copy with one element replaced by NaN, lying as the tensor lies where that is possible."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return tensor
    spot = tuple(int(rng.integers(n)) for n in tensor.shape)
    if any(stride == 0 for stride in tensor.stride()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor[spot] = float("nan")
    return tensor


def exact(tensor: torch.Tensor | None) -> Array | None:
    """The values as float64 (or as the integers or booleans they are); every dtype here fits exactly."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bool or not tensor.dtype.is_floating_point:
        return tensor.numpy(force=True).copy()
    return tensor.detach().to(torch.float64).numpy().copy()


def array(tensor: torch.Tensor) -> Array:
    """The same for a tensor that is there."""
    values = exact(tensor)
    assert values is not None
    return values


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int]:
    """Query heads and key/value heads: equal, grouped, one for all."""
    kv_heads = draw(st.integers(1, 3))
    return kv_heads * draw(st.sampled_from((1, 1, 2, 3, 4))), kv_heads


# --- the cases of testdata/ -------------------------------------------------------------------------------------------

STORED_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
FOUR_BIT = ("int4", "mxfp4", "nvfp4")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class StoredResult:
    """An output as the file gives it."""

    dtype: str
    values: Array
    exact: bool


@dataclass(frozen=True)
class Stored:
    """A case of testdata/, as a call of a public function; `expect` is None where the data is at fault."""

    name: str
    function: str
    kwargs: dict[str, Any]
    expect: dict[str, StoredResult] | None


def packed(values: Array, dtype: str) -> torch.Tensor:
    """Four-bit values two to a byte along the last axis, the low half first."""
    if dtype == "int4":
        codes = values.astype(np.int64) & 15
    else:
        codes = np.searchsorted(E2M1, np.abs(values)) + 8 * np.signbit(values)
    codes = codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), dtype=np.uint8)], axis=-1)
    return torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)


def unpacked(tensor: torch.Tensor, dtype: str, columns: int) -> Array:
    """The values behind the bytes."""
    bytes_ = tensor.numpy()
    codes = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], 2 * bytes_.shape[-1])
    codes = codes[..., :columns]
    if dtype == "int4":
        return np.where(codes >= 8, codes.astype(np.int64) - 16, codes).astype(np.float64)
    return np.asarray(np.where(codes & 8, -1.0, 1.0) * np.array(E2M1)[codes & 7])


def _stored_tensor(given: dict[str, Any]) -> torch.Tensor:
    data = np.array([float(x) for x in given["data"]], dtype=np.float64)
    if given["dtype"] in FOUR_BIT:
        if "strides" in given:
            step = data.itemsize
            start = data[given["offset"] :]
            strides = [s * step for s in given["strides"]]
            data = np.lib.stride_tricks.as_strided(start, given["shape"], strides).copy()
        return packed(data.reshape(given["shape"]), given["dtype"])
    buffer = torch.from_numpy(data).to(STORED_DTYPES[given["dtype"]])
    if "strides" not in given:
        return buffer.reshape(given["shape"])
    return buffer.as_strided(given["shape"], given["strides"], given["offset"])


RENAMED = {"ckv_cache": "ckv", "kpe_cache": "kpe"}


def stored(function: str, *operations: str) -> list[Stored]:
    """Every stored case of some operations, as calls of the public function that stands for them."""
    found = []
    for operation in operations:
        path = Path(__file__).parents[2] / "testdata" / "ops" / f"{operation}.json"
        for case in json.loads(path.read_text())["cases"]:
            kwargs = {RENAMED.get(n, n): _stored_tensor(t) for n, t in case["inputs"].items()} | case["params"]
            left, right = kwargs.pop("window_left", -1), kwargs.pop("window_right", -1)
            if (left, right) != (-1, -1):
                kwargs["window"] = left if function.startswith("paged") else (left, right)
            if case["call"] in ("attention.full", "attention.causal"):
                kwargs["causal"] = case["call"] == "attention.causal"
            if case["layout"] is not None:
                kwargs["layout"] = case["layout"]
            expect = {
                name: StoredResult(
                    e["dtype"],
                    np.array([float(x) for x in e["data"]], dtype=np.float64).reshape(e["shape"]),
                    e.get("exact", False),
                )
                for name, e in case.get("expect", {}).items()
            }
            found.append(Stored(f"{operation}/{case['name']}", function, kwargs, None if "error" in case else expect))
    return found
