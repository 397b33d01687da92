"""One attention out of two over different keys."""

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Weighs both results by the sums of their softmaxes, in float32 or wider."""
    work = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    sum_a, sum_b = lse_a.to(work), lse_b.to(work)
    # Where both parts attended to nothing, neither has a weight; `logaddexp` has no gradient there.
    nothing = (sum_a == -torch.inf) & (sum_b == -torch.inf)
    base = torch.logaddexp(sum_a.masked_fill(nothing, 0.0), sum_b.masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)
    lse = base.masked_fill(nothing, -torch.inf)
    # A part that attended to nothing takes no part, whatever it holds.
    a, b = (
        torch.where((total == -torch.inf)[..., None], 0.0, (total - base).exp()[..., None] * out.to(work))
        for total, out in ((sum_a, out_a), (sum_b, out_b))
    )
    return (a + b).to(out_a.dtype), lse.float()
