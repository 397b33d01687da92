# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""One attention out of two over different keys: every number is read once and written once."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, planned, power

# Numbers of results that a block of threads merges.
_BLOCK = 2048


@triton.jit
def _merge(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, y_ptr, lse_ptr,
    rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    some = row < rows
    lse_a = tl.load(lse_a_ptr + row, mask=some, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row, mask=some, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    # A NaN among the two is one of the result, and `maximum` may lose it.
    top = tl.where((lse_a != lse_a) | (lse_b != lse_b), float("nan"), top)
    # Where both attended to nothing, any number will do. Of two plus infinities the weights are NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = weight_a + weight_b
    tl.store(lse_ptr + row, tl.where(top == float("-inf"), top, base + tl.log(total)), mask=some)
    at = row[:, None] * width + column[None, :]
    inside = some[:, None] & (column < width)[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.where(top == float("-inf"), 1.0, total)
    # A part that attended to nothing takes no part, whatever it holds.
    y = tl.where((lse_a == float("-inf"))[:, None], 0.0, a * (weight_a / share)[:, None])
    y += tl.where((lse_b == float("-inf"))[:, None], 0.0, b * (weight_b / share)[:, None])
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@planned
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    """Weighs both results by the sums of their softmaxes."""
    given = (out_a, lse_a, out_b, lse_b)
    if not all(tensor.is_contiguous() for tensor in given):
        return lambda *tensors: merge_states(*(tensor.contiguous() for tensor in tensors)), given
    rows, width = lse_a.numel(), out_a.shape[-1]
    columns = power(max(width, 1))
    together = max(_BLOCK // columns, 1)
    launch = Launch(_merge, -(-rows // together), out_a.device, (rows, width), (together, columns))

    def call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        launch(out_a, lse_a, out_b, lse_b, output, lse)
        return output, lse

    return call, given


KERNELS: dict[str, Callable[..., Any]] = {"triton.merge_states": merge_states}
