"""What the rows of `layerzero bench out-of-box` must give, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layerzero.bench.layer_rows import TOP_K, TOP_P
from layerzero.bench.row import CPU, Sizes
from torch import Tensor

#: Sizes at which every row is small enough to be computed in float64.
SMALL = Sizes(seq=16, batch=2, context=48, largest=CPU.largest, longest=256)


class Recording:
    """Stands in for LayerZero's module: its functions give their name and arguments."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: (name, args, kwargs)


def wide(value: Any) -> Any:
    """The same in float64, of tensors of floating-point numbers."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def is_right(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """By the tolerance of the dtype, absolute and relative."""
    assert len(got) == len(want)
    for one, right in zip(got, want, strict=True):
        assert one.shape == right.shape
        off = (one.double() - right).abs() - tolerance * (1.0 + right.abs())
        assert off.max() <= 0, f"off by {off.max():.1e} beyond the tolerance"


def may_be_drawn(name: str, logits: Tensor) -> Tensor:
    """Which tokens each row may draw: the k largest, or the fewest that have the probability; up to rounding at the edge."""
    ordered, ids = logits.softmax(-1).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    places = torch.arange(logits.shape[-1]).expand_as(ids)
    kept = places < TOP_K if name == "sample_topk" else before < TOP_P + 1e-5
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def reconstructs(values: Tensor, scale: Tensor, x: Tensor) -> None:
    """Quantized values and a scale for each row give the numbers back, to half a step of the format."""
    largest = 127.0 if values.dtype == torch.int8 else 448.0
    right = x.abs().amax(-1, keepdim=True) / largest
    torch.testing.assert_close(scale.double().reshape(-1, 1), right, rtol=1e-6, atol=0.0)
    step = right if values.dtype == torch.int8 else torch.maximum(x.abs() * 2**-3, right * 2**-9)
    assert ((values.double() * scale.double().reshape(-1, 1) - x).abs() <= step * (0.5 + 1e-4)).all()
