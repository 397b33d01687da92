"""Calls with arrays that are not torch's, over several trailing dimensions, and random seeds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from layerzero import _native


class Quantized(NamedTuple):
    """What :func:`layerzero.quantize` gives when it chose the scales itself."""

    values: Any
    scales: Any
    zero_points: Any


def _is_numpy(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


def call_arrays(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with numpy arrays, or tensors of another library: borrowed by torch without a copy. Numpy in, numpy out."""
    import torch

    def borrow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        if _is_numpy(value) and hasattr(value, "__array_interface__"):
            # Arrays that are read only (of bytes, of a file) are lent all the same: kernels only write to what is updated.
            return torch.from_numpy(value) if value.flags.writeable else _read_only(value)
        return torch.from_dlpack(value) if hasattr(value, "__dlpack__") else value

    given = [*args, *kwargs.values()]
    numpy = any(_is_numpy(v) for v in given) and not any(isinstance(v, torch.Tensor) for v in given)
    result = getattr(_native, name)(*map(borrow, args), **{k: borrow(v) for k, v in kwargs.items()})
    return _as_numpy(result) if numpy else result


def _read_only(value: Any) -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(value)


def _as_numpy(result: Any) -> Any:
    if isinstance(result, Quantized):
        return Quantized(*map(_as_numpy, result))
    if isinstance(result, tuple):
        return tuple(map(_as_numpy, result))
    return result if result is None else result.numpy()


def call_flattened(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over several trailing dimensions: the same norm over one, of their product."""
    from layerzero.errors import InvalidCallError

    function = getattr(_native, name)
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
    result = function(**{**kwargs, "input": flat}).reshape(x.shape)
    return result if out is None else out.copy_(result)


def draw_seed(generator: Any = None) -> int:
    """A seed from a generator, or from torch's default one: ``torch.manual_seed`` makes what follows reproducible."""
    try:
        import torch
    except ImportError:
        import secrets

        return secrets.randbits(62)
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**62, (), generator=generator, device=device))
