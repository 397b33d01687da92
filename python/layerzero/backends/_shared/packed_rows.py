"""Queries or keys packed along the first dimension: which rows belong to a sequence."""

import itertools
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


def _read(indptr: Tensor) -> tuple[Rows, tuple[int, int, int] | None]:
    """The rows, and the first place that does not ascend: where, what it holds, and what came before."""
    ends: list[int] = indptr.tolist()
    before = [0, *ends[:-1]]
    wrong = next(((at, end, last) for at, (last, end) in enumerate(zip(before, ends, strict=True)) if end < last), None)
    longest = max((end - start for start, end in itertools.pairwise(ends)), default=0)
    return Rows(ends[0], ends[-1], longest), wrong


_known = Remembered(_read)


def rows_of(name: str, indptr: Tensor, limit: int, promised: int = 0) -> Rows:
    """The rows of sequences, which ascend within 0 to `limit`; none is longer than `promised` (0: nothing was)."""
    rows, wrong = _known.of(indptr)
    if wrong is not None:
        raise bad_data(f"{name}[{wrong[0]}]", wrong[1], f"expected {wrong[2]} or more, ascending")
    if rows.end > limit:
        place = f"{name}[{indptr.shape[0] - 1}]"
        raise bad_data(place, rows.end, f"expected at most {limit}, which is how many rows there are")
    check_longest(f"max_seqlen_{name[-1]}", promised, rows.longest)
    return rows


def check_longest(name: str, promised: int, longest: int) -> None:
    """Raises for a sequence that is longer than was promised (0: nothing was)."""
    if 0 < promised < longest:
        raise bad_data(name, promised, f"expected at least {longest}, the length of the longest sequence")
