"""Rows of packed queries that attend to nothing, or belong to no sequence: zeros, whatever a kernel leaves there."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows a kernel computes, and those among them, by their place, that are zeros all the same."""

    first: int
    end: int
    zeros: Tensor | None

    def of(self, tensor: Tensor) -> Tensor:
        """The rows a kernel is given."""
        return tensor if self.end - self.first == tensor.shape[0] else tensor[self.first : self.end]

    def whole(self, output: Tensor, rows: int) -> Tensor:
        """The kernel's output with all that must be zeros, as long as the query."""
        if self.zeros is not None:
            output[self.zeros] = 0.0
        if self.end - self.first == rows:
            return output
        padded = output.new_zeros(rows, *output.shape[1:])
        padded[self.first : self.end] = output
        return padded


def rows_of(ends: Sequence[int], lengths: Sequence[int], causal: bool, device: torch.device) -> Rows | None:
    """The rows of sequences that own rows `ends[b]` to `ends[b + 1]` and attend to `lengths[b]` keys; `None` when all
    rows are zeros."""
    first, end = ends[0], ends[-1]
    nothing: list[int] = []
    for (start, stop), length in zip(itertools.pairwise(ends), lengths, strict=True):
        # The last row stands at the last key; those that stand before the first key see it only when they may look ahead.
        without = stop - start if length == 0 else max(stop - start - length, 0) if causal else 0
        nothing += range(start - first, start - first + without)
    if len(nothing) == end - first:
        return None
    return Rows(first, end, torch.tensor(nothing, device=device) if nothing else None)
