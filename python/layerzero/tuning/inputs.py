"""Inputs for a call that is only written down: random, and valid for what the operation means by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero import _native

if TYPE_CHECKING:
    from torch import Tensor

#: What `Data` of whole numbers is drawn from.
_WHOLE = {"uint8": (0, 16), "int8": (-8, 8), "int16": (-8, 8), "int32": (-8, 8), "int64": (-8, 8)}
#: Formats torch has no dtype for: two values to a byte, and the call says which.
_PACKED = ("int4", "mxfp4", "nvfp4")
#: So many normal numbers are drawn for a tensor on the CPU at most, and then come again: drawing them takes longer than what is
#: measured with them. It is a prime, so that no row of a tensor is as another.
_DRAWN = 1_048_583


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, and what is to be known of it."""

    #: The function of ``layerzero`` that makes the call.
    function: str
    #: Its arguments.
    kwargs: dict[str, Any]
    #: The tensors it updates, by argument.
    updated: tuple[str, ...]
    #: The operation.
    op: str
    #: Its kind: ``tensor``, ``sampling``, …
    kind: str
    #: Floating-point operations.
    flops: float
    #: The kernel that defines what right means.
    reference: str
    #: How far results may be off, relative to their size.
    tolerance: float

    def copied(self) -> dict[str, Any]:
        """The arguments, with copies of those that are updated."""
        return {k: v.clone() if k in self.updated else v for k, v in self.kwargs.items()}

    def drawn_apart(self) -> dict[str, Any]:
        """As :meth:`copied`, with a seed where the call would draw from torch's generator: what the program draws after
        ``torch.manual_seed`` must not depend on what happens in the background."""
        draws = self.kind == "sampling" and "uniform" not in self.kwargs
        return self.copied() | ({"seed": 0} if draws else {})


def make(call: str, device: int = 0, seed: int = 0) -> Inputs:
    """Inputs for a call, given as JSON, on a device of the engine. The same seed gives the same numbers."""
    import torch

    needs = _native.call_inputs(call, device)
    place = torch.device(_native.device_name(device))
    # Not every backend of torch draws numbers on its device.
    drawn_on = place if place.type in ("cpu", "cuda") else torch.device("cpu")
    generator = torch.Generator(device=drawn_on).manual_seed(seed)
    kwargs: dict[str, Any] = {}
    updated = []
    for name, (dtype, shape, strides, meaning, sizes, is_updated) in needs["tensors"].items():
        if dtype in _PACKED:
            halves = [*shape[:-1], shape[-1] // 2]
            packed = torch.randint(0, 256, halves, generator=generator, device=generator.device).to(torch.uint8)
            kwargs[name] = packed.to(place)
            kwargs["format"] = dtype
            continue
        made = _fill(generator, getattr(torch, dtype, None), dtype, list(shape), meaning, *sizes)
        if name.endswith("weight") and made.is_floating_point() and made.dim() == 2:
            # As weights are: sums over them stay of the size of one number.
            made = made / made.shape[-1] ** 0.5
        made = made.to(place)
        kwargs[name] = made if strides is None else _strided(made, list(shape), list(strides))
        if is_updated:
            updated.append(name)
    kwargs |= needs["params"]
    return Inputs(
        function=needs["function"],
        kwargs=kwargs,
        updated=tuple(updated),
        op=needs["op"],
        kind=needs["kind"],
        flops=needs["flops"],
        reference=needs["reference"],
        tolerance=needs["tolerance"] or 0.0,
    )


def _strided(values: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    if any(stride < 0 for stride in strides):
        raise ValueError(f"strides {strides} cannot be had in torch; they must not be negative")
    if values.numel() == 0:
        return values
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    strided = values.new_zeros(reach).as_strided(shape, strides)
    # Broadcast axes are one and the same memory, which cannot be copied to as a whole.
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    strided[index].copy_(values[index])
    return strided


def _fill(generator: Any, dtype: Any, name: str, shape: list[int], meaning: str, limit: int, least: int) -> Tensor:
    import torch

    device = generator.device
    if dtype is None:
        raise ValueError(f"torch has no dtype {name}: tensors of it cannot be made here")
    if meaning == "index":
        return torch.randint(0, max(limit, 1), shape, generator=generator, device=device).to(dtype)
    if meaning == "alike":
        rows = torch.randint(0, max(limit, 1), shape, generator=generator, device=device)
        rows[..., :least] = rows[:1, :least]
        return rows.to(dtype)
    if meaning == "counted":
        count = torch.arange(_product(shape), device=device) % max(limit, 1)
        return count.reshape(shape).to(dtype)
    if meaning == "length":
        return (limit - torch.randint(0, max(limit // 2, 1), shape, generator=generator, device=device)).to(dtype)
    if meaning == "length_from":
        below = max(min(limit // 2, limit - least + 1), 1)
        return (limit - torch.randint(0, below, shape, generator=generator, device=device)).to(dtype)
    if meaning in ("bounds", "parts"):
        return _divided(shape, limit, meaning, device).to(dtype)
    if meaning == "probabilities":
        weights = torch.rand(shape, generator=generator, device=device) + 0.05
        return (weights / weights.sum(-1, keepdim=True)).to(dtype)
    if meaning == "uniform":
        return torch.rand(shape, generator=generator, device=device).to(dtype)
    if meaning == "positive":
        return (0.0625 + torch.rand(shape, generator=generator, device=device) / 2).to(dtype)
    if meaning == "mask":
        uniform = torch.rand(shape, generator=generator, device=device)
        return uniform < 0.9 if dtype == torch.bool else -uniform.to(dtype)
    if meaning == "unknown":
        return torch.zeros(shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return _normal(generator, dtype, shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator, device=device) < 0.5
    low, high = _WHOLE.get(name, (0, 2))
    return torch.randint(low, high, shape, generator=generator, device=device).to(dtype)


def _normal(generator: Any, dtype: Any, shape: list[int]) -> Tensor:
    import torch

    count = _product(shape)
    if generator.device.type != "cpu" or count <= _DRAWN:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    drawn = torch.randn(_DRAWN, generator=generator).to(dtype)
    return drawn.repeat(-(-count // _DRAWN))[:count].reshape(shape)


def _divided(shape: list[int], limit: int, meaning: str, device: Any) -> Tensor:
    import torch

    last = shape[-1] if shape else 1
    if meaning == "bounds":
        row = torch.arange(last, device=device) * limit // max(last - 1, 1)
    else:
        ends = torch.arange(last + 1, device=device) * limit // max(last, 1)
        row = ends[1:] - ends[:-1]
    return row.expand(shape).contiguous()


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
