"""Calls with arrays that are not torch's, over several trailing dimensions, and random seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from layerzero import _native
from layerzero.errors import ArgumentTypeError, InvalidCallError, UnsupportedTensorError

#: What numpy and torch both have.
_DTYPES = frozenset(["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])


class Quantized(NamedTuple):
    """What :func:`layerzero.quantize` gives when it chose the scales itself."""

    values: Any
    scales: Any
    zero_points: Any


def _is_numpy(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


def _function(name: str, kernel: str | None) -> Callable[..., Any]:
    """What a call is made anew with: the function, or just one kernel of it."""
    return getattr(_native, name) if kernel is None else partial(_native.run_kernel, kernel)


def call_arrays(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kernel: str | None = None) -> Any:
    """A call with numpy arrays, or tensors of another library: borrowed by torch without a copy. Numpy in, numpy out."""
    import torch

    updates = _updates(name)
    given = {key: _borrowed(name, key, value, updates) for key, value in kwargs.items()}
    numpy = any(map(_is_numpy, kwargs.values())) and not any(isinstance(v, torch.Tensor) for v in kwargs.values())
    result = _function(name, kernel)(*args, **given)
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return _as_numpy(result) if numpy else result


def rows_of(tensor: Any, index: Any, column: int) -> tuple[Any, Any]:
    """The rows (of the first axis) that a column of indices names, and a copy of each. Indices outside are left to the
    kernel to refuse: here they stand for the nearest row."""
    if _is_numpy(tensor):
        rows = index[:, column].clip(0, max(tensor.shape[0] - 1, 0))
        return rows, tensor[rows].copy() if tensor.shape[0] else tensor.copy()
    rows = index[:, column].clamp(0, max(tensor.shape[0] - 1, 0)).long()
    return rows, tensor.index_select(0, rows) if tensor.shape[0] else tensor.clone()


def put_rows(tensor: Any, rows: Any, copy: Any) -> None:
    """Puts rows back as :func:`rows_of` found them."""
    if tensor.shape[0]:
        tensor[rows] = copy


@cache
def _updates(name: str) -> frozenset[str]:
    return frozenset(next(f["updates"] for f in _native.functions() if f["name"] == name)) | {"out"}


def _borrowed(name: str, key: str, value: Any, updates: frozenset[str]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    text = f"{name}: '{key}'"
    if not (_is_numpy(value) and hasattr(value, "__array_interface__")):
        try:
            return torch.utils.dlpack.from_dlpack(value) if hasattr(value, "__dlpack__") else value
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            hint = "pass a torch.Tensor or a numpy array"
            raise UnsupportedTensorError(f"{text}: {error}", code="UNSUPPORTED_TENSOR", hint=hint) from error
    if not hasattr(value, "__setitem__"):
        # numpy's scalars look like arrays in all but this.
        kind = type(value).__name__
        raise ArgumentTypeError(f"{text} is a {kind}, expected a tensor", code="NOT_A_TENSOR", hint="pass an array")
    if hasattr(value, "mask"):
        hint = "fill it with .filled(); what is masked is an argument of its own"
        raise UnsupportedTensorError(f"{text} is a masked array", code="UNSUPPORTED_TENSOR", hint=hint)
    if str(value.dtype) not in _DTYPES:
        hint = "cast it, for instance to float32, or pass a torch.Tensor"
        raise ArgumentTypeError(f"{text} is {value.dtype}, which torch cannot borrow", code="WRONG_DTYPE", hint=hint)
    lendable = all(s >= 0 and s % value.itemsize == 0 for s in value.strides)
    if key in updates and not (lendable and value.flags.writeable):
        why = "is read only" if lendable else "has strides torch does not have"
        raise InvalidCallError(f"{text} {why}", code="READ_ONLY", hint="pass an array that can be updated")
    if not lendable:
        value = value.copy()
    if value.flags.writeable:
        return torch.from_numpy(value)
    with warnings.catch_warnings():
        # Arrays that are read only are lent all the same: kernels write only to what is updated.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(value)


def _as_numpy(result: Any) -> Any:
    if isinstance(result, Quantized):
        return Quantized(*map(_as_numpy, result))
    if isinstance(result, tuple):
        return tuple(map(_as_numpy, result))
    if result is None:
        return None
    dtype = str(result.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        text = f"the result is {dtype}, which numpy does not have"
        raise UnsupportedTensorError(text, code="UNSUPPORTED_TENSOR", hint="pass torch tensors")
    return result.numpy()


def call_flattened(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kernel: str | None = None) -> Any:
    """A norm over several trailing dimensions: the same norm over one, of their product."""
    kwargs = dict(kwargs)
    x, sizes = kwargs["input"], tuple(kwargs.pop("normalized_shape"))
    if not sizes or tuple(x.shape[-len(sizes) :]) != sizes:
        raise InvalidCallError(
            f"{name}: normalized_shape is {sizes}, the input has shape {tuple(x.shape)}",
            code="WRONG_SHAPE",
            hint="pass the sizes of the input's trailing dimensions",
        )
    for weight in ("weight", "bias"):
        if (w := kwargs.get(weight)) is not None:
            if tuple(w.shape) != sizes:
                raise InvalidCallError(
                    f"{name}: '{weight}' has shape {tuple(w.shape)}, normalized_shape is {sizes}",
                    code="WRONG_SHAPE",
                    hint=f"make '{weight}' of the shape that is normalized over",
                )
            kwargs[weight] = w.reshape(-1)
    out = kwargs.pop("out", None)
    flat = x.reshape(*x.shape[: -len(sizes)], math.prod(sizes))
    result = _function(name, kernel)(**{**kwargs, "input": flat}).reshape(x.shape)
    if out is None:
        return result
    out[...] = result
    return out


def draw_seed(generator: Any = None) -> int:
    """A seed from a generator, or from torch's default one: ``torch.manual_seed`` makes what follows reproducible."""
    try:
        import torch
    except ImportError:
        import secrets

        return secrets.randbits(62)
    if generator is not None and not isinstance(generator, torch.Generator):
        text = f"generator is a {type(generator).__name__}, expected a torch.Generator"
        raise ArgumentTypeError(text, code="BAD_PARAM", hint="pass a torch.Generator, or a seed")
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**62, (), generator=generator, device=device))
