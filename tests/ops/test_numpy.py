"""Arrays of other libraries: numpy in, numpy out, whatever they lie like in memory, and nothing copied or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch_cases import CASES, IDS, Case, assert_right, expected

Array = NDArray[Any]

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
READ_ONLY = np.frombuffer(X.tobytes(), np.float32).reshape(4, 6)


def normed(x: Array, eps: float = 1e-6) -> Array:
    """What rms_norm gives, in float64."""
    wide = x.astype(np.float64)
    result: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return result


def as_arrays(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with arrays for its tensors; each has memory of its own."""

    def array(value: Any) -> Any:
        return value.numpy().copy() if isinstance(value, torch.Tensor) else value

    args, kwargs = case.make(5)
    return tuple(map(array, args)), {name: array(value) for name, value in kwargs.items()}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_numpy_in_numpy_out(case: Case) -> None:
    args, kwargs = as_arrays(case)
    results = case.call(*args, **kwargs)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    got = (*results, *(args[at] for at in case.updates))
    assert all(isinstance(result, np.ndarray) for result in got)
    assert_right(tuple(map(torch.from_numpy, got)), expected(case))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_kernel_takes_arrays_by_name_too(case: Case) -> None:
    for kernel in lz.list_kernels(case.function):
        args, kwargs = as_arrays(case)
        if kernel.available and lz.validate(kernel.kernel_id, *args, **kwargs)[0]:
            results = lz.run_kernel(kernel.kernel_id, *args, **kwargs)
            results = results if isinstance(results, tuple) else () if results is None else (results,)
            got = (*results, *(args[at] for at in case.updates))
            assert all(isinstance(result, np.ndarray) for result in got), kernel.kernel_id
            assert_right(tuple(map(torch.from_numpy, got)), expected(case))


def every_other(x: Array) -> Array:
    """The same values with gaps between them."""
    wide = np.full((2 * x.shape[0], 3 * x.shape[1]), np.nan, x.dtype)
    wide[::2, ::3] = x
    return wide[::2, ::3]


def unaligned(x: Array) -> Array:
    """The same values in rows that are no multiple of an element apart, at an odd address."""
    room = np.zeros(x.shape[0] * (x.shape[1] * 4 + 2) + 1, np.uint8)
    view = np.ndarray(x.shape, x.dtype, buffer=room, offset=1, strides=(x.shape[1] * 4 + 2, 4))
    view[:] = x
    return view


LYING: dict[str, Callable[[Array], Array]] = {
    "row by row": lambda x: x,
    "column by column": np.asfortranarray,
    "with gaps": every_other,
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "rows backwards": lambda x: x[::-1].copy()[::-1],
    "unaligned": unaligned,
    "read only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "a matrix": lambda x: x.view(np.matrix),
    "of a record": lambda x: np.rec.fromarrays([x, x], names="a,b").a,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", LYING)
def test_an_array_may_lie_in_memory_any_way(way: str) -> None:
    x = LYING[way](X)
    got = lz.rms_norm(x)
    assert type(got) is np.ndarray and got.shape == X.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, normed(X), rtol=1e-6, atol=1e-6)
    assert np.array_equal(x, X)


def test_one_value_may_stand_for_a_row() -> None:
    x = np.broadcast_to(X[:1], (3, 6))
    np.testing.assert_allclose(lz.rms_norm(x), normed(x), rtol=1e-6, atol=1e-6)
    assert lz.rms_norm(X[:0]).shape == (0, 6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_dtypes_stay(dtype: type) -> None:
    got = lz.rms_norm(X.astype(dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, normed(X.astype(dtype)), rtol=2e-3, atol=2e-3)


def test_nothing_is_copied() -> None:
    seen: list[torch.Tensor] = []

    def watch(input: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append(input)
        return input + eps

    lz.register_kernel(
        operation="norm.rms", kernel_id="watch.norm", platform="cpu", supported_dtypes=["float32"], priority=99
    )(watch)
    try:
        x = X.copy()
        lz.rms_norm(x)
        assert seen[-1].data_ptr() == x.ctypes.data
        lz.rms_norm(READ_ONLY)
        assert seen[-1].data_ptr() == READ_ONLY.ctypes.data
    finally:
        lz.unregister_kernel("watch.norm")


# --- results ----------------------------------------------------------------------------------------------------------


def test_out_is_written_and_given_back() -> None:
    out = np.full((4, 12), np.nan, np.float32)[:, ::2]
    assert lz.rms_norm(X, out=out) is out
    np.testing.assert_allclose(out, normed(X), rtol=1e-6, atol=1e-6)


def test_what_is_read_only_is_never_written() -> None:
    caches = [np.zeros((2, 4, 1, 6), np.float32) for _ in range(2)]
    caches[1].flags.writeable = False
    out = np.zeros((4, 6), np.float32)
    out.flags.writeable = False
    rows = X[:, None]
    for call in (lambda: lz.rms_norm(X, out=out), lambda: lz.kv_append(rows, rows, *caches, np.arange(4))):
        with pytest.raises(lz.LayerZeroError, match="read.only"):
            call()
    assert not out.any() and not caches[1].any()


def test_caches_are_updated_where_they_are() -> None:
    caches = [np.zeros((2, 4, 2, 1, 6), np.float32)[:, :, 0] for _ in range(2)]
    rows = X[:, None]
    lz.kv_append(rows, -rows, *caches, np.array([0, 5, -1, 3]))
    flat = [cache.reshape(8, 1, 6) for cache in caches]
    assert np.array_equal(flat[0][[0, 5, 3]], rows[[0, 1, 3]]) and np.array_equal(flat[1][[0, 5, 3]], -rows[[0, 1, 3]])
    assert not flat[0][[1, 2, 4, 6, 7]].any()


def test_quantized_arrays_are_a_named_tuple_of_arrays() -> None:
    quantized = lz.quantize(X, "int8", granularity="per_channel")
    assert isinstance(quantized, lz.Quantized) and all(isinstance(part, np.ndarray) for part in quantized)
    restored = lz.dequantize(quantized.values, quantized.scales, granularity="per_channel")
    assert (abs(restored - X) <= 0.501 * quantized.scales).all()
    given = lz.quantize(X, "int8", quantized.scales, granularity="per_channel")
    assert isinstance(given, np.ndarray) and np.array_equal(given, quantized.values)


def test_torch_wins_where_both_are_given() -> None:
    weight = torch.ones(6)
    assert isinstance(lz.rms_norm(X, weight), torch.Tensor)
    assert isinstance(lz.rms_norm(torch.from_numpy(X), weight.numpy()), torch.Tensor)
    out = torch.empty(4, 6)
    assert lz.rms_norm(X, out=out) is out


# --- other producers --------------------------------------------------------------------------------------------------


class Producer:
    """A tensor of a library nobody has heard of: nothing but the protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.asked = 0

    def __dlpack__(self, **options: Any) -> Any:
        self.asked += 1
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_any_producer_gives_tensors() -> None:
    x = torch.from_numpy(X.copy())
    producer = Producer(x)
    got = lz.rms_norm(producer)
    assert isinstance(got, torch.Tensor) and producer.asked
    np.testing.assert_allclose(got.numpy(), normed(X), rtol=1e-6, atol=1e-6)


def test_any_producer_can_be_written_to() -> None:
    caches = [Producer(torch.zeros(2, 4, 1, 6)) for _ in range(2)]
    rows = Producer(torch.from_numpy(X.copy())[:, None])
    lz.kv_append(rows, rows, *caches, Producer(torch.tensor([7, 1, 2, 3])))
    assert torch.equal(caches[0].tensor.view(8, 6)[7], torch.from_numpy(X[0]))
    out = Producer(torch.empty(4, 6))
    assert lz.rms_norm(Producer(rows.tensor[:, 0]), out=out) is out
    np.testing.assert_allclose(out.tensor.numpy(), normed(X), rtol=1e-6, atol=1e-6)


def test_the_result_of_tensors_can_be_written_to_an_array() -> None:
    out = np.zeros((4, 6), np.float32)
    assert lz.rms_norm(torch.from_numpy(X), out=out) is out
    np.testing.assert_allclose(out, normed(X), rtol=1e-6, atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


class Failing:
    """A producer that cannot."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not today")

    def __dlpack_device__(self) -> Any:
        return (1, 0)


BFLOAT16 = np.dtype(__import__("ml_dtypes").bfloat16)
REFUSED: dict[str, Callable[[], Any]] = {
    "integers": lambda: lz.rms_norm(np.ones((2, 3), np.int64)),
    "unsigned": lambda: lz.rms_norm(np.ones((2, 3), np.uint16)),
    "objects": lambda: lz.rms_norm(np.ones((2, 3), object)),
    "complex": lambda: lz.rms_norm(np.ones((2, 3), np.complex64)),
    "times": lambda: lz.rms_norm(np.zeros((2, 3), "datetime64[s]")),
    "swapped bytes": lambda: lz.rms_norm(X.astype(">f4")),
    "a scalar": lambda: lz.rms_norm(np.float32(1.0)),
    "masked": lambda: lz.rms_norm(np.ma.masked_less(X, 0.0)),
    "a producer that fails": lambda: lz.rms_norm(Failing()),
    "float8, which numpy lacks": lambda: lz.quantize(X, "fp8_e4m3"),
    "bfloat16, which numpy lacks": lambda: lz.dequantize(
        np.ones((2, 3), np.int8), np.ones((1, 1), np.float32), dtype="bfloat16"
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_one_clear_sentence(what: str) -> None:
    with pytest.raises(lz.LayerZeroError) as caught:
        REFUSED[what]()
    assert caught.value.hint and "ScalarType" not in str(caught.value)


def test_bfloat16_of_ml_dtypes_is_taken_or_refused_clearly() -> None:
    try:
        got = lz.rms_norm(X.astype(BFLOAT16))
    except lz.LayerZeroError as error:
        assert error.code == "WRONG_DTYPE" and "bfloat16" in str(error)
    else:
        assert got.dtype == BFLOAT16
        np.testing.assert_allclose(got.astype(np.float64), normed(X), rtol=1e-2, atol=1e-2)
