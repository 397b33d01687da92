"""Finding the most likely tokens of a row, and the one a number draws, without sorting the vocabulary."""

import math

import torch
from torch import Tensor

# Bins by how far a logit lies below the largest one: their width, and their number, beyond which all share the last.
# What lies so far below weighs nothing to speak of.
_BINS_PER_UNIT = 256.0
_BINS = 8192


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row, descending, the lower index first among equals; and their indices.

    Numbers are grouped, and only groups whose largest is among the `count` largest of groups can hold what is wanted:
    as many numbers as that reach the least of these. A row that holds a NaN gives it first, and anything after it.
    """
    vocab = rows.shape[1]
    size = math.isqrt(vocab // count)
    if size < 2 or rows.shape[0] == 0:
        return _sorted(rows, count)
    # Group i holds the numbers i, i + groups, i + 2 * groups and so on, so that reading is in order.
    groups = -(-vocab // size)
    full = vocab // groups
    tops = rows[:, : full * groups].view(-1, full, groups).amax(1)
    left = vocab - full * groups
    if left > 0:
        torch.maximum(tops[:, :left], rows[:, full * groups :], out=tops[:, :left])
    least = tops.topk(count).values[:, -1:]
    width = max(int((tops >= least).sum(-1).max()), count)
    if 2 * width * size >= vocab:
        return _sorted(rows, count)
    chosen = tops.topk(width, sorted=False).indices[:, None]
    ids = (chosen + groups * torch.arange(size, device=rows.device)[:, None]).flatten(1)
    # Places beyond the last number come after all others, by their value and by their index.
    values = rows.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -math.inf)
    # Of equal numbers topk takes any: so it takes all that reach the least.
    width = max(int((values >= least).sum(-1).max()), count)
    values, order = values.topk(width, sorted=False)
    ids, by_id = ids.gather(1, order).sort(-1)
    values, order = values.gather(1, by_id).sort(stable=True, dim=-1, descending=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def _sorted(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, ids = rows.sort(stable=True, dim=-1, descending=True)
    return values[:, :count], ids[:, :count]


def drawn_by_bins(row: Tensor, log_total: Tensor, p: float, uniform: float) -> int:
    """The token that a number from 0 to below 1 draws from the smallest set of tokens whose probability reaches p.

    The order within a bin matters in two of them only: where p is reached, and where the token is drawn.
    """
    probabilities = torch.exp(row.double() - log_total)
    wide = row.to(torch.promote_types(row.dtype, torch.float32))
    bins = (row.amax() - wide).mul_(_BINS_PER_UNIT).clamp_(max=_BINS - 1).long()
    masses = torch.zeros(_BINS, dtype=torch.float64, device=row.device).scatter_add_(0, bins, probabilities)
    reached = masses.cumsum(0)

    def bin_of(index: int) -> tuple[Tensor, Tensor]:
        """The tokens of a bin, in order, and the probability up to and with each of them."""
        ids = (bins == index).nonzero().flatten()
        order = row[ids].sort(stable=True, descending=True).indices
        ids = ids[order]
        return ids, probabilities[ids].cumsum(0).add_(reached[index - 1] if index > 0 else 0.0)

    last = _first(reached, p)
    if last == _BINS:
        # Rounding leaves the sum below p.
        last = int(bins.max())
    ids, sums = bin_of(last)
    kept = float(sums[min(_first(sums, p), sums.shape[0] - 1)])
    wanted = uniform * kept
    index = _first(reached, wanted, beyond=True)
    if index < last:
        ids, sums = bin_of(index)
        kept = float(sums[-1])
    # The number may not be below one, or be rounded beyond the sum: then it is the last token that adds to it.
    place = min(_first(sums, wanted, beyond=True), _first(sums, kept))
    return int(ids[place])


def _first(ascending: Tensor, number: float, beyond: bool = False) -> int:
    """The first place whose number reaches, or exceeds, the given one; the length if there is none."""
    return int(torch.searchsorted(ascending, number, right=beyond))
