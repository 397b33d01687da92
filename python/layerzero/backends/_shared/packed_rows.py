"""Queries packed along the first dimension: which rows belong to a sequence."""

from typing import NamedTuple

from torch import Tensor

from .data_errors import bad_data
from .tensor_contents import Remembered


class Rows(NamedTuple):
    """The rows that belong to sequences, and how many the longest sequence has."""

    first: int
    end: int
    longest: int

    def zero_others(self, output: Tensor) -> Tensor:
        """Rows of no sequence are zeros; kernels do not write to them."""
        if self.first > 0:
            output[: self.first] = 0.0
        if self.end < output.shape[0]:
            output[self.end :] = 0.0
        return output


def _read(cu_seqlens_q: Tensor) -> Rows:
    ends: list[int] = cu_seqlens_q.tolist()
    previous = longest = 0
    for place, end in enumerate(ends):
        if end < previous:
            raise bad_data(f"cu_seqlens_q[{place}]", end, f"expected {previous} or more, ascending")
        longest = max(longest, end - previous) if place else 0
        previous = end
    return Rows(ends[0], ends[-1], longest)


_known = Remembered(_read)


def rows_of(cu_seqlens_q: Tensor, query: Tensor) -> Rows:
    """The rows of sequences, which lie within the query's."""
    rows = _known.of(cu_seqlens_q)
    if rows.end > query.shape[0]:
        place = f"cu_seqlens_q[{cu_seqlens_q.shape[0] - 1}]"
        raise bad_data(place, rows.end, f"expected at most {query.shape[0]}, which is how many rows there are")
    return rows
