"""Which elements of a tensor share a scale."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rows of groups, groups in a row, and how many elements a group has; the last of a row may have fewer."""

    rows: int
    across: int
    size: int
    columns: int

    @staticmethod
    def of(shape: tuple[int, ...], granularity: str, group_size: int) -> "Groups":
        """The groups of a tensor of that shape."""
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if granularity == "per_tensor":
            return Groups(1, 1, max(rows * columns, 1), rows * columns)
        size = min(group_size, max(columns, 1)) if granularity == "blockwise" else max(columns, 1)
        return Groups(rows, -(-columns // size) if granularity == "blockwise" else 1, size, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of their scales."""
        return self.rows, self.across

    @property
    def ragged(self) -> bool:
        """Whether the last group of a row is shorter."""
        return self.columns != self.across * self.size

    def have(self, scale: Tensor | None) -> bool:
        """Whether given scales lie one after the other, one per group, or are just one, or none."""
        return (
            scale is None or scale.numel() == 1 or (scale.numel() == self.rows * self.across and scale.is_contiguous())
        )

    def each(self, scale: Tensor | None) -> Any:
        """Given scales (one per group, one per row of them, or one) so that the groups have them."""
        if scale is None or scale.numel() == 1:
            return scale
        return (scale[:, None] if scale.dim() == 1 else scale).expand(self.shape).contiguous()


def step(scale: Tensor | None) -> int:
    """How far apart the scales of neighbouring groups are."""
    return 0 if scale is None or scale.numel() == 1 else 1
