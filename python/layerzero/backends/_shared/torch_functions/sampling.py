"""Sampling from logits, and speculative verification.

Probabilities are computed in float64, so that a draw is the one the definition gives.
"""

import math

import torch
from torch import Tensor

from layerzero.errors import InvalidCallError
from layerzero.kernels import draws

from ..blocks import blocks, rows_of
from ..data_errors import bad_number, check_indices
from .selection import drawn_by_bins, largest

# How many tokens of a row are tried first; sixteen times as many each time they do not suffice.
_TRIED = 1024
# How many of them are tried before bins, which take the same time however many are needed.
_LIKELY = 128
# How many weights race for a draw on a CPU. Beyond, random numbers for all of them cost more than sums and a search.
_RACED = 512


@draws
def topk_literal(logits: Tensor, k: int, seed: int | None) -> Tensor:
    """What one writes: the k most likely tokens, and one of them by chance."""
    rows = rows_of(logits)
    values, ids = torch.topk(rows, min(k, rows.shape[1]))
    return _one_of(values.softmax(-1, dtype=torch.float32), ids, seed).reshape(logits.shape[:-1])


@draws
def topp_literal(logits: Tensor, p: float, seed: int | None) -> Tensor:
    """What one writes: probabilities in descending order, those after p is reached left out, and one of the rest by chance."""
    values, ids = rows_of(logits).softmax(-1, dtype=torch.float32).sort(-1, descending=True)
    if p < 1.0:
        values.masked_fill_(values.cumsum(-1).sub_(values) >= p, 0.0)
    return _one_of(values, ids, seed).reshape(logits.shape[:-1])


def _one_of(weights: Tensor, ids: Tensor, seed: int | None) -> Tensor:
    """Of each row the id of one place, with a chance in proportion to its weight; -1 where weights are NaN."""
    searches = weights.is_cpu and weights.numel() > _RACED
    place = _searched(weights, seed) if searches else _raced(weights, seed)
    return ids.gather(-1, place)[:, 0].masked_fill_(weights[:, 0].isnan(), -1)


def _searched(weights: Tensor, seed: int | None) -> Tensor:
    """The first place whose sum exceeds a part of the total: one random number for a row, where a race takes one for each
    place. Most of a race's time on a CPU is spent on these."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    wanted = _draws((weights.shape[0], 1), weights, seed).mul_(sums[:, -1:])
    # Beyond the end is the place of a NaN.
    return torch.searchsorted(sums, wanted, right=True).clamp_(max=weights.shape[1] - 1)


def _raced(weights: Tensor, seed: int | None) -> Tensor:
    """The place with the largest w / e, where e is exponentially distributed: it is place i with the chance w_i / sum(w). This is
    how `torch.multinomial` draws one sample, without its checks, which on a GPU end the process."""
    generator = None if seed is None else _seeded(weights.device, seed)
    noise = torch.empty_like(weights).exponential_(generator=generator)
    return noise.reciprocal_().mul_(weights).argmax(-1, keepdim=True)


@draws
def topk(logits: Tensor, uniform: Tensor | None, k: int, seed: int | None) -> Tensor:
    """Draws one of the k most likely tokens of each row."""
    rows = rows_of(logits)
    kept, ids = _largest(rows, min(k, rows.shape[1]))
    probabilities = torch.softmax(kept.double(), -1)
    return _drawn(ids, probabilities, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


@draws
def topk_grouped(logits: Tensor, uniform: Tensor | None, k: int, seed: int | None) -> Tensor:
    """The same, looking only at the groups of tokens that can hold the most likely ones."""
    rows = rows_of(logits)
    kept, ids = largest(rows, min(k, rows.shape[1]))
    probabilities = torch.softmax(kept.double(), -1)
    return _drawn(ids, probabilities, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


@draws
def topp(logits: Tensor, uniform: Tensor | None, p: float, seed: int | None) -> Tensor:
    """Draws from the smallest set of tokens whose probability reaches p."""
    rows = rows_of(logits)
    log_total = torch.logsumexp(rows.double(), -1, keepdim=True)
    tried = min(_TRIED, rows.shape[1])
    while True:
        kept, ids = _largest(rows, tried)
        probabilities = torch.exp(kept.double() - log_total)
        reached = probabilities.cumsum(-1) >= p
        # Rows whose probabilities are NaN are never drawn from, and need not reach anything.
        if tried == rows.shape[1] or bool((reached[:, -1] | log_total[:, 0].isnan()).all()):
            break
        tried = min(16 * tried, rows.shape[1])
    probabilities = _nucleus(probabilities, reached)
    return _drawn(ids, probabilities, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


@draws
def topp_sorted(logits: Tensor, uniform: Tensor | None, p: float, seed: int | None) -> Tensor:
    """The same from the sorted vocabulary."""
    values, ids = rows_of(logits).sort(stable=True, dim=-1, descending=True)
    probabilities = torch.softmax(values.double(), -1)
    probabilities = _nucleus(probabilities, probabilities.cumsum(-1) >= p)
    return _drawn(ids, probabilities, _uniform(uniform, logits, seed)).reshape(logits.shape[:-1])


@draws
def topp_binned(logits: Tensor, uniform: Tensor | None, p: float, seed: int | None) -> Tensor:
    """The same from a few most likely tokens where they suffice, else from bins of tokens."""
    rows = rows_of(logits)
    numbers = _uniform(uniform, logits, seed)
    parts = [torch.logsumexp(part.double(), -1, keepdim=True) for (part,) in blocks(rows, whole=1)]
    log_total = parts[0] if len(parts) == 1 else torch.cat(parts)
    kept, ids = largest(rows, min(_LIKELY, rows.shape[1]))
    probabilities = torch.exp(kept.double() - log_total)
    reached = probabilities.cumsum(-1) >= p
    drawn = _drawn(ids, _nucleus(probabilities, reached), numbers)
    if kept.shape[1] < rows.shape[1]:
        for row in (~reached[:, -1] & log_total[:, 0].isfinite()).nonzero().flatten().tolist():
            drawn[row] = drawn_by_bins(rows[row], log_total[row], p, float(numbers[row]))
    return drawn.reshape(logits.shape[:-1])


def _nucleus(probabilities: Tensor, reached: Tensor) -> Tensor:
    """The token that reaches p is kept, those after it are not."""
    beyond = torch.zeros_like(reached)
    beyond[:, 1:] = reached[:, :-1]
    probabilities = probabilities.masked_fill(beyond, 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True)


def _largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row, descending, the lower index first among equals; and their indices."""
    if 4 * count < rows.shape[1]:
        values, ids = torch.topk(rows, count + 1)
        # Of equal numbers topk takes any: which ones matters only where they lie on both sides of the cut.
        if not bool((values[:, -2] == values[:, -1]).any()):
            ids = ids[:, :count].sort(-1).values
            values, order = rows.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
            return values, ids.gather(-1, order)
    values, ids = rows.sort(stable=True, dim=-1, descending=True)
    return values[:, :count], ids[:, :count]


def _uniform(uniform: Tensor | None, logits: Tensor, seed: int | None) -> Tensor:
    if uniform is not None:
        return checked_uniform(uniform).reshape(-1)
    return _draws((math.prod(logits.shape[:-1]),), logits, seed)


def checked_uniform(uniform: Tensor) -> Tensor:
    """The numbers as float64. On the CPU they are checked; on other devices that would mean to wait for the device."""
    numbers = uniform.double()
    if numbers.is_cpu and numbers.numel():
        lowest, largest = numbers.aminmax()
        # A NaN is both.
        if not (float(lowest) >= 0.0 and float(largest) < 1.0):
            raise bad_number(
                "uniform", numbers, (numbers >= 0.0) & (numbers < 1.0), "expected a number from 0 to below 1"
            )
    return numbers


def _draws(shape: tuple[int, ...], like: Tensor, seed: int | None) -> Tensor:
    """Uniform numbers of a seed; without one, the next of torch's generator, which is safe in CUDA graphs."""
    generator = None if seed is None else _seeded(like.device, seed)
    return torch.rand(shape, dtype=torch.float64, device=like.device, generator=generator)


def check_seed(device: torch.device, seed: int) -> None:
    """Raises where a CUDA graph is captured, which would keep the seed."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        text = f"seed is {seed}, and a CUDA graph is captured: every replay would draw the same numbers"
        hint = "leave seed out, or pass uniform= and change it between replays"
        raise InvalidCallError(text, code="SEED_IN_GRAPH", hint=hint)


def _seeded(device: torch.device, seed: int) -> torch.Generator:
    check_seed(device, seed)
    return torch.Generator(device).manual_seed(seed)


def _drawn(ids: Tensor, probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The id at the place drawn from each row of descending probabilities, or -1 where they are none. A NaN is always
    among what is kept, since sorting puts it first."""
    place, valid = _place(probabilities, uniform)
    return ids.gather(-1, place[:, None])[:, 0].masked_fill_(~valid, -1)


def _place(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row at which the cumulative probability exceeds the uniform number, and whether the
    row has probabilities at all."""
    exceeds = probabilities.cumsum(-1) > uniform[:, None]
    place = exceeds.to(torch.uint8).argmax(-1)
    # Rounding may leave the number beyond the sum: then it is the last place that has any probability.
    last = probabilities.shape[-1] - 1 - (probabilities > 0.0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(exceeds.any(-1), place, last), probabilities.sum(-1) > 0.0


@draws
def speculative(
    draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniform: Tensor | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Accepts or rejects drafted tokens so that the result is distributed as the target model's."""
    batch, draft, vocab = draft_probs.shape
    uniform = _draws((batch, draft + 1), draft_probs, seed) if uniform is None else checked_uniform(uniform)
    try:
        return verified(draft_ids, draft_probs, target_probs, uniform)
    except RuntimeError:
        # On the CPU `gather` refuses an id that is not in the vocabulary.
        check_indices("draft_ids", draft_ids, vocab)
        raise


def verified(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Verification by float64 numbers from 0 to below 1. No step waits for the device."""
    batch, draft, vocab = draft_probs.shape
    draft_ids = draft_ids.long()
    at_token = draft_ids[:, :, None]
    drafted, wanted = draft_probs.gather(2, at_token)[:, :, 0], target_probs.gather(2, at_token)[:, :, 0]
    # 1 up to the first rejection, then 0.
    kept = (uniform[:, :draft] * drafted < wanted).cumprod(1)
    accepted = kept.sum(1)

    # Of each sequence one row is drawn from: no other is widened.
    sequence = torch.arange(batch, device=draft_ids.device)
    weights = target = target_probs[sequence, accepted].double()
    if draft > 0:
        rest = target - draft_probs[sequence, accepted.clamp(max=draft - 1)]
        # Below 0 is 0. Not clamp, which some builds let swallow a NaN.
        rest = torch.threshold(rest, 0.0, 0.0)
        usable = rest.any(1).logical_and_(accepted < draft)
        weights = torch.where(usable[:, None], rest, target)
    # The first place whose sum exceeds the number times the total. No sum does where the total is 0, infinite or NaN.
    sums = weights.cumsum(1)
    place = torch.searchsorted(sums, sums[:, -1:] * uniform[:, draft:], right=True)
    drawn = place.masked_fill_(place == vocab, -1)

    ids = draft_ids.new_full((batch, draft + 1), -1)
    # In bits, an id or 0 is the id, and an id or -1 is -1.
    torch.bitwise_or(draft_ids, kept - 1, out=ids[:, :draft])
    return ids.scatter_(1, accepted[:, None], drawn), accepted
