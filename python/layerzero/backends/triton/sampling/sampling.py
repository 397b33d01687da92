"""Sampling from logits, without sorting the vocabulary.

The token a number draws is found by its weight: tokens are ordered by value, and how much lies above a value is a sum. Two
values are looked for, the one at which the set of kept tokens ends and the one that is drawn. Sums above steps, then
above thresholds around where the values should be, narrow them down, in float32 and with a margin; then what lies above
is added up in float64, what lies between is put aside, and a last step sorts it and finds the token. Where too much lies
between, the last step searches it, or the whole row: slower, and as right.

Sums are formed in an order that depends on the vocabulary alone. Without `uniform`, the number of a row is the one the
references draw for the seed.
"""

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.arrays import draw_seed
from layerzero.kernels import draws

from ..._shared.blocks import rows_of
from ..._shared.torch_functions.sampling import check_seed
from ..launching import Launch, power, processors
from ..overlapping import overlaps
from .choosing import choose
from .drawing import words
from .narrowing import narrow, put_aside, survey


class Sizes(NamedTuple):
    """How the work is cut. Results depend on it in the last bits of sums only, which must not depend on the rows."""

    parts: int = 32
    """Parts of a row that are worked on side by side, at most."""
    least: int = 512
    """Tokens of a part, at least."""
    slots: int = 16384
    """Tokens of a row that can be put aside."""
    steps: int = 32
    thresholds: int = 16
    """For both intervals together."""
    block: int = 1024
    at_once: tuple[int, int, int] = (8, 8, 4)
    """How many tokens of each thread are loaded before the first is worked on."""
    few: int = 256
    some: int = 512
    many: int = 1024
    """Tokens put aside are sorted if they are no more than this."""
    ways: int = 8
    last_block: int = 512
    warps: tuple[int, int, int, int] = (4, 4, 8, 8)
    """Of each launch: more warps are sooner done with a part, and longer with putting its sums together."""
    busy: tuple[int, int, int] = (4, 4, 4)
    """Programs for each multiprocessor: beyond them, a program works on several parts."""


SIZES = Sizes()


class Plan(NamedTuple):
    """The launches for calls of a kind; each takes the tensors and the numbers that differ."""

    room: int
    survey: Launch
    narrow: Launch
    put_aside: Launch
    choose: Launch


@lru_cache(maxsize=256)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    uniform: tuple[Any, ...] | None,
    by_count: bool,
    all_kept: bool,
) -> Plan:
    sizes = SIZES
    rows, vocab = shape
    row, step = strides[0], uniform[1] if uniform else 0
    # Parts begin where loads are aligned.
    share = max(-(-vocab // (sizes.parts * 64)) * 64, sizes.least)
    parts = max(power(-(-vocab // share)), 2)
    kept = sizes.slots // parts
    block = min(power(share), sizes.block)
    room = words(parts, kept, sizes.steps, sizes.thresholds)
    how = (by_count, all_kept, uniform is not None)
    cut = (room, parts, kept, sizes.steps, sizes.thresholds)
    last = (sizes.few, sizes.some, sizes.many, sizes.ways, sizes.last_block)
    # Where two launches have more programs than there are multiprocessors, those of the second are spread unevenly.
    overlap = overlaps(device) and 2 * rows * parts <= processors(device)

    def launch(kernel: Any, scalars: tuple[int, ...], constants: tuple[Any, ...], number: int) -> Launch:
        each = min(power(-(-rows * parts // (processors(device) * sizes.busy[number]))), parts)
        scalars, constants = (row, vocab, share, each, *scalars), (*constants, overlap)
        return Launch(
            kernel,
            rows * parts // each,
            device,
            scalars,
            constants,
            sizes.warps[number],
            overlaps=overlap and number > 0,
        )

    return Plan(
        room * rows,
        launch(survey, (), (by_count, *cut, block, 32 * sizes.warps[0], sizes.at_once[0]), 0),
        launch(narrow, (step,), (*how, *cut, 32 * sizes.warps[1], sizes.at_once[1]), 1),
        launch(put_aside, (step,), (*how, *cut, 32 * sizes.warps[2], sizes.at_once[2]), 2),
        Launch(
            choose, rows, device, (row, vocab, step), (*how, *cut, *last, overlap), sizes.warps[3], overlaps=overlap
        ),
    )


def numbers_for(
    device: torch.device, shape: tuple[int, ...], uniform: Tensor | None, seed: int | None
) -> tuple[Tensor | None, int]:
    """The numbers of a call: those given, or the seed that they follow from."""
    if uniform is not None:
        return uniform, 0
    if seed is not None:
        check_seed(device, seed)
        return None, seed
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # torch's generator gives other numbers in every replay; a seed would be part of the graph.
        return torch.rand(shape, dtype=torch.float64, device=device), 0
    return None, draw_seed()


def _sampled(
    logits: Tensor, uniform: Tensor | None, wanted: int, seed: int | None, by_count: bool, all_kept: bool
) -> Tensor:
    rows = logits if logits.dim() == 2 else rows_of(logits)
    kind = None
    uniform, number = numbers_for(rows.device, (rows.shape[0],), uniform, seed)
    if uniform is not None:
        if uniform.dim() != 1:
            uniform = uniform.reshape(-1)
        kind = (uniform.dtype, uniform.stride(0), uniform.data_ptr() % 16)
    device = rows.device
    ids = torch.empty(logits.shape[:-1], dtype=torch.int64, device=device)
    if rows.shape[0] == 0:
        return ids
    aligned = rows.data_ptr() % 16 == 0
    plan = _plan(rows.shape, rows.stride(), rows.dtype, device, aligned, kind, by_count, all_kept)
    work = torch.empty(plan.room, dtype=torch.float64, device=device)
    plan.survey(rows, work)
    plan.narrow(rows, uniform, work, wanted, number)
    plan.put_aside(rows, uniform, work, wanted, number)
    plan.choose(rows, uniform, work, ids, wanted, number)
    return ids


def _bits(number: float) -> int:
    """The bits of a float64: Triton would round the number itself to float32."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


@draws
def topp(logits: Tensor, uniform: Tensor | None, p: float, seed: int | None) -> Tensor:
    """Draws from the smallest set of tokens whose probability reaches p."""
    return _sampled(logits, uniform, _bits(p), seed, False, p >= 1.0)


@draws
def topk(logits: Tensor, uniform: Tensor | None, k: int, seed: int | None) -> Tensor:
    """Draws one of the k most likely tokens of each row."""
    all_kept = k >= logits.shape[-1]
    return _sampled(logits, uniform, k, seed, not all_kept, all_kept)


KERNELS: dict[str, Callable[..., Any]] = {"triton.topp": topp, "triton.topk": topk}
