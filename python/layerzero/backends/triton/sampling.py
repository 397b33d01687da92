"""Sampling from logits, without sorting the vocabulary.

The token a number draws is found by its weight: tokens are ordered by value, and how much lies above a value is a sum. Two
values are looked for, the one at which the set of kept tokens ends and the one that is drawn. A few rounds of sums above
thresholds narrow them down, in float32 and with a margin; then what lies above is added up in float64, what lies
between is put aside, and a last step finds the token among it by bisection. Where too much lies between, the last step
goes through the whole row: slower, and as right.

Sums are formed in an order that depends on the vocabulary alone. Without `uniform`, the number of a row is the one the
references draw for the seed.
"""

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..torch.blocks import rows_of
from .choosing import _finish
from .drawing import _extremes, _put_aside, _round
from .launching import Launch, power

SPLITS = 16
"""Parts of a row that are worked on side by side."""

KEPT = 256
"""Tokens a part can put aside."""

THRESHOLDS = 16
ROUNDS = 3
_BLOCK = 1024
# Rows up to this length are held by one block of threads.
_WHOLE = 4096


@lru_cache(maxsize=256)
def _steps(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    uniform: tuple[Any, ...] | None,
    by_count: bool,
    all_kept: bool,
) -> tuple[Callable[..., None], ...]:
    """The launches for calls of a kind; each takes the tensors and the numbers that differ."""
    rows, vocab = shape
    given, step = uniform is not None, uniform[1] if uniform else 0
    row = strides[0]
    whole = vocab <= _WHOLE
    last_block = max(power(vocab), 16) if whole else SPLITS * KEPT
    finish = Launch(
        _finish,
        rows,
        device,
        (row, vocab, step, rows),
        (ROUNDS, last_block, whole, by_count, all_kept, given, SPLITS, KEPT, _BLOCK),
        8,
    )
    if whole:
        return (finish,)
    # Parts begin where loads are aligned.
    share = -(-vocab // (SPLITS * 64)) * 64
    grid = rows * SPLITS
    extremes = Launch(_extremes, grid, device, (row, vocab, share), (SPLITS, _BLOCK), 4)
    rounds = [
        Launch(
            _round,
            grid,
            device,
            (row, vocab, share, step, rows),
            (number, by_count, all_kept, given, SPLITS, THRESHOLDS, 256),
            8,
        )
        for number in range(ROUNDS)
    ]
    aside = Launch(
        _put_aside,
        grid,
        device,
        (row, vocab, share, step, rows),
        (ROUNDS, by_count, all_kept, given, SPLITS, THRESHOLDS, KEPT, _BLOCK),
        4,
    )
    return (extremes, *rounds, aside, finish)


def _sampled(logits: Tensor, uniform: Tensor | None, wanted: int, seed: int, by_count: bool, all_kept: bool) -> Tensor:
    rows = logits if logits.dim() == 2 else rows_of(logits)
    kind = None
    if uniform is not None:
        uniform = uniform.reshape(-1)
        kind = (uniform.dtype, uniform.stride(0), uniform.data_ptr() % 16)
    device = rows.device
    aligned = rows.data_ptr() % 16 == 0
    steps = _steps(rows.shape, rows.stride(), rows.dtype, device, aligned, kind, by_count, all_kept)
    ids = torch.empty(logits.shape[:-1], dtype=torch.int64, device=device)
    if rows.shape[0] == 0:
        return ids
    if len(steps) == 1:
        steps[0](rows, uniform, None, None, None, None, None, ids, wanted, seed)
        return ids
    parts = rows.shape[0] * SPLITS
    ends = torch.empty(parts, 3, dtype=torch.float32, device=device)
    sums = torch.empty(ROUNDS, parts, THRESHOLDS, dtype=torch.float32, device=device)
    edges = torch.empty(ROUNDS + 1, rows.shape[0], 4, dtype=torch.float32, device=device)
    exact = torch.empty(parts, 3, dtype=torch.float64, device=device)
    places = torch.empty(parts, KEPT, dtype=torch.int32, device=device)
    counts = torch.empty(parts, dtype=torch.int32, device=device)
    extremes, *rounds, aside, finish = steps
    extremes(rows, ends)
    for launch in rounds:
        launch(rows, uniform, ends, sums, edges, wanted, seed)
    aside(rows, uniform, ends, sums, edges, exact, places, counts, wanted, seed)
    finish(rows, uniform, ends, edges, exact, places, counts, ids, wanted, seed)
    return ids


def _bits(number: float) -> int:
    """The bits of a float64: Triton would round the number itself to float32."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def topp(logits: Tensor, uniform: Tensor | None, p: float, seed: int) -> Tensor:
    """Draws from the smallest set of tokens whose probability reaches p."""
    return _sampled(logits, uniform, _bits(p), seed, False, p >= 1.0)


def topk(logits: Tensor, uniform: Tensor | None, k: int, seed: int) -> Tensor:
    """Draws one of the k most likely tokens of each row."""
    all_kept = k >= logits.shape[-1]
    return _sampled(logits, uniform, k, seed, not all_kept, all_kept)


KERNELS: dict[str, Callable[..., Any]] = {"triton.topp": topp, "triton.topk": topk}
