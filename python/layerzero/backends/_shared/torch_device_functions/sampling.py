"""Sampling from logits, and speculative verification, without a step that waits for the device.

Probabilities are summed in float64, so that a draw is the one the definition gives. A token is found by searching the
sums, which takes next to no time.
"""

import torch
from torch import Tensor

from layerzero.kernels import draws

from ..blocks import rows_of
from ..torch_functions.sampling import _draws, _uniform, verified

_LOW_BITS = 0x7FFFFFFF
_BELOW_ONE = 1.0 - 2.0**-53
"""The largest float64 below 1."""


@draws
def topk(logits: Tensor, uniform: Tensor | None, k: int, seed: int | None) -> Tensor:
    """Draws one of the k most likely tokens of each row, by `torch.topk`."""
    rows = rows_of(logits)
    count = min(k, rows.shape[1])
    # Of equal numbers `topk` takes any: with the index below them no two are equal.
    keys = torch.topk(_ordered(rows), count).values
    ids = rows.shape[1] - 1 - (keys & 0xFFFFFFFF)
    drawn = _drawn(rows.gather(1, ids), ids, 1.0, _uniform(uniform, logits, seed))
    return drawn.masked_fill_(rows.amax(1).isnan(), -1).reshape(logits.shape[:-1])


def _ordered(rows: Tensor) -> Tensor:
    """Integers in the order of the numbers, the lower index first among equals: the number above, the index below."""
    # The two zeros are equal, and as integers they are not.
    bits = (rows.float() + 0.0).view(torch.int32)
    bits = (bits ^ ((bits >> 31) & _LOW_BITS)).long()
    return (bits << 32) | torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)


@draws
def topk_sorted(logits: Tensor, uniform: Tensor | None, k: int, seed: int | None) -> Tensor:
    """The same from the sorted vocabulary."""
    rows = rows_of(logits)
    values, ids = rows.sort(stable=True, dim=-1, descending=True)
    count = min(k, rows.shape[1])
    return _drawn(values[:, :count], ids, 1.0, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


@draws
def topp_sorted(logits: Tensor, uniform: Tensor | None, p: float, seed: int | None) -> Tensor:
    """Draws from the smallest set of tokens whose probability reaches p, from the sorted vocabulary."""
    values, ids = rows_of(logits).sort(stable=True, dim=-1, descending=True)
    return _drawn(values, ids, p, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


def _drawn(values: Tensor, ids: Tensor, p: float, uniform: Tensor) -> Tensor:
    """The id drawn from each row of descending logits, cut where their probability reaches p; -1 where they are none.

    A NaN comes first when numbers are sorted, and makes all sums NaN.
    """
    sums = torch.softmax(values, -1, dtype=torch.float64).cumsum(-1)
    total = sums[:, -1:].contiguous()
    # Rounding may leave the sum below p: then it is the last token that adds to it.
    last = torch.searchsorted(sums, total)
    if p < 1.0:
        last = torch.minimum(last, torch.searchsorted(sums, torch.full_like(total, p)))
    last = last.clamp_(max=sums.shape[1] - 1)
    wanted = sums.gather(1, last) * uniform[:, None]
    place = torch.minimum(torch.searchsorted(sums, wanted, right=True), last)
    return ids.gather(1, place)[:, 0].masked_fill_(total[:, 0].isnan(), -1)


@draws
def speculative(
    draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniform: Tensor | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Accepts or rejects drafted tokens so that the result is distributed as the target model's."""
    batch, draft, _ = draft_probs.shape
    if uniform is None:
        uniform = _draws((batch, draft + 1), draft_probs, seed)
    else:
        # A number outside [0, 1) counts as the nearest one inside, NaN as one beyond all.
        uniform = uniform.double().nan_to_num(1.0).clamp(0.0, _BELOW_ONE)
    return verified(draft_ids, draft_probs, target_probs, uniform)
