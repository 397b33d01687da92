# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Speculative verification in one launch, one program for each sequence.

Probabilities are subtracted and summed in float64, so that a draw is the one the definition gives. A drafted id that is not in
the vocabulary is rejected: to raise, the host would have to wait for the device.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.kernels import draws

from ..launching import Launch, power
from .drawing import number_of_seed, within
from .sampling import numbers_for

# Tokens that are looked at together.
_BLOCK = 4096


@triton.jit
def _number(uniform_ptr, at, seed, counter, there, GIVEN: tl.constexpr):
    """Numbers of a sequence, as float64 within 0 to 1: those given, or those of the seed."""
    if GIVEN:
        u = within(tl.load(uniform_ptr + at, mask=there, other=0.0).to(tl.float64))
    else:
        u = number_of_seed(seed, counter)
    return u


@triton.jit
def _weights(target_ptr, draft_ptr, column, there, subtracts):
    """What a token may be drawn by: its probability, or what is left of it. A NaN stays one."""
    wanted = tl.load(target_ptr + column, mask=there, other=0.0).to(tl.float64)
    rest = wanted - tl.load(draft_ptr + column, mask=there & subtracts, other=0.0).to(tl.float64)
    return wanted, tl.where(rest < 0.0, 0.0, rest)


@triton.jit(do_not_specialize=["seed"])
def _verify(
    ids_ptr, draft_ptr, target_ptr, uniform_ptr, output_ptr, accepted_ptr, seed: tl.int64,
    draft, vocab, ids_row, ids_step, draft_row, draft_step, target_row, target_step, uniform_row, uniform_step,
    GIVEN: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, STEPS)
    drafted = step < draft
    token = tl.load(ids_ptr + row * ids_row + step * ids_step, mask=drafted, other=-1).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    draft_ptr += row * draft_row
    target_ptr += row * target_row
    first_number = row * (draft + 1)
    u = _number(uniform_ptr, row * uniform_row + step * uniform_step, seed, first_number + step, drafted, GIVEN)
    offered = tl.load(draft_ptr + step.to(tl.int64) * draft_step + token, mask=known, other=0.0).to(tl.float64)
    wanted = tl.load(target_ptr + step.to(tl.int64) * target_step + token, mask=known, other=0.0).to(tl.float64)
    # The first step that is not accepted; the one after the last draft never is.
    accepted = tl.min(tl.where(drafted & (u * offered < wanted), STEPS, step), 0)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    ids = tl.where(step < accepted, token, -1)
    tl.store(output_ptr + first_number + step, ids, mask=(step <= draft) & (step != accepted))

    target_ptr += accepted.to(tl.int64) * target_step
    draft_ptr += accepted.to(tl.int64) * draft_step
    block = tl.arange(0, BLOCK)
    whole = tl.zeros([BLOCK], tl.float64)
    left = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        column = start + block
        of_target, rest = _weights(target_ptr, draft_ptr, column, column < vocab, accepted < draft)
        whole += of_target
        left += rest
    total = tl.sum(left, 0)
    # Where nothing is left, the token is drawn from the target itself.
    subtracts = (accepted < draft) & (total != 0.0)
    total = tl.where(total != 0.0, total, tl.sum(whole, 0))
    is_some = (total > 0.0) & (total < float("inf"))
    at = row * uniform_row + draft * uniform_step
    last_number = _number(uniform_ptr, at, seed, first_number + draft, True, GIVEN)
    # Nothing exceeds the total times 1, however the sums are rounded.
    bound = tl.where(last_number < 1.0, last_number * total, float("inf"))

    before = tl.zeros([], tl.float64)
    place = tl.full([], -1, tl.int32)
    last = tl.full([BLOCK], -1, tl.int32)
    start = tl.where(is_some, 0, vocab)
    while (place < 0) & (start < vocab):
        column = start + block
        _, weight = _weights(target_ptr, draft_ptr, column, column < vocab, subtracts)
        last = tl.where(weight > 0.0, column, last)
        here = tl.sum(weight, 0)
        if before + here > bound:
            exceeds = (before + tl.cumsum(weight, 0) > bound) & (weight > 0.0)
            place = tl.min(tl.where(exceeds, column, vocab), 0)
        before += here
        start += BLOCK
    # Rounding may leave the bound beyond the sum: then it is the last token that adds to it.
    place = tl.where((place < 0) | (place == vocab), tl.max(last, 0), place)
    tl.store(output_ptr + first_number + accepted, place.to(tl.int64))


@lru_cache(maxsize=256)
def _plan(
    shape: torch.Size, device: torch.device, tensors: tuple[tuple[Any, ...], ...], uniform: tuple[Any, ...] | None
) -> Launch:
    """The launch for calls of a kind; of each tensor its strides, its dtype and whether its address is a multiple of 16."""
    batch, draft, vocab = shape
    strides = [step for kind in tensors for step in kind[0][:2]]
    steps = uniform[0] if uniform else (0, 0)
    block = min(power(max(vocab, 2)), _BLOCK)
    # One more step than is drafted: the one that is not accepted.
    constants = (uniform is not None, power(draft + 1), block)
    return Launch(_verify, batch, device, (draft, vocab, *strides, *steps), constants, min(max(block // 256, 1), 8))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0


@draws
def speculative(
    draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, uniform: Tensor | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Accepts or rejects drafted tokens so that the result is distributed as the target model's."""
    batch, draft, _ = draft_probs.shape
    device = draft_probs.device
    uniform, number = numbers_for(device, (batch, draft + 1), uniform, seed)
    kinds = _kind(draft_ids), _kind(draft_probs), _kind(target_probs)
    launch = _plan(draft_probs.shape, device, kinds, None if uniform is None else _kind(uniform))
    ids = torch.empty((batch, draft + 1), dtype=torch.int64, device=device)
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    launch(draft_ids, draft_probs, target_probs, uniform, ids, accepted, number)
    return ids, accepted


KERNELS: dict[str, Callable[..., Any]] = {"triton.speculative": speculative}
