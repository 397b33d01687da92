"""What results are compared by: in checked mode, for kernels in a rollout, and of compiled models with the model's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def synchronize() -> None:
    """Waits for the accelerator, so that what went wrong there is raised here."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "cuda":
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    # Waiting for a device must not be what initialises CUDA.
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def has_nan(result: Any) -> bool:
    """Whether a result has a NaN."""
    import torch

    return any(t.is_floating_point() and bool(torch.isnan(t).any()) for t in _tensors(result))


def has_more_nan(result: Any, right: Any) -> bool:
    """Whether a result has a NaN where the right one has none."""
    import torch

    pairs = zip(_tensors(result), _tensors(right), strict=True)
    return any(t.is_floating_point() and bool((torch.isnan(t) & ~torch.isnan(r)).any()) for t, r in pairs)


def difference(one: Any, other: Any, rtol: float) -> tuple[float, bool]:
    """The largest difference of two results, and whether all are within ``rtol`` of the size of the values.

    Results of another dtype, shape or device differ infinitely.
    """
    import torch

    ones, others = _tensors(one), _tensors(other)
    if len(ones) != len(others):
        return (float("inf"), False)
    worst, within = 0.0, True
    for a, b in zip(ones, others, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return (float("inf"), False)
        if a.numel() == 0:
            continue
        with torch.no_grad():
            x, y = a.double(), b.double()
            apart = torch.where(torch.isnan(x) & torch.isnan(y) | (x == y), 0.0, (x - y).abs())
            apart = torch.where(torch.isnan(apart), float("inf"), apart)
            # Kernels round differently, so that two right ones may be twice the tolerance apart.
            # What is infinitely apart is within no tolerance, not even that of an infinite value.
            within = within and bool((apart.isfinite() & (apart <= 2 * rtol * (1.0 + y.abs()))).all())
            worst = max(worst, float(apart.max()))
    return (worst, within)


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of some tensors, each in parts of its largest number. Infinite where one has another NaN or infinity."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if not theirs.is_floating_point() or not theirs.numel():
            continue
        ours, theirs = ours.double(), theirs.double()
        numbers = theirs.isfinite()
        if not numbers.equal(ours.isfinite()) or not ours[~numbers].nan_to_num().equal(theirs[~numbers].nan_to_num()):
            return math.inf
        if numbers.any():
            difference, size = float((ours - theirs)[numbers].abs().max()), float(theirs[numbers].abs().max())
            worst = max(worst, difference / size if size > 0 else difference)
    return worst
