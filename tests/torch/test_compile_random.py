"""Random modules: what `lz.compile` gives is what torch gives, with every pass left out in turn, and for other sizes.

A failure prints its seed and the smallest module that still fails. `python tests/support/random_checks.py SEED 1` repeats it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from random_checks import failure
from random_modules import written
from strategies import SCALE

#: 60 modules in CI, 10,000 at full scale; random graphs in Rust (crates/lz-graph/tests/compiled) are many more.
MODULES = 60 if SCALE < 1 else 10_000
PART = 10


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """torch tells of every size that is 1."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(MODULES // PART))
def test_random_modules(part: int) -> None:
    """Ten seeds each."""
    failures = [failure(seed) for seed in range(part * PART, (part + 1) * PART)]
    assert not any(failures), "\n\n".join(filter(None, failures))


#: What the modules of these seeds have shown, when it was wrong.
KNOWN = {
    7: "a view of a constant that begins where the constant does was packed as if it were the constant",
    175: "a residual of float64 was added by a kernel that has no float64",
    17: "the same, with a weight that is not square: the kernel failed at every first call",
    321: "a pass met a node that nothing read, and that its own first change had removed",
    429: "a part that begins before the first element of an axis whose size is a symbol",
    111: "batch norm of halves added a float32 to a bfloat16",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", KNOWN)
def test_what_was_wrong_before(seed: int) -> None:
    """These stay right."""
    assert failure(seed) == ""


def test_a_seed_gives_the_same_module() -> None:
    """Else a printed seed would be of no use."""
    assert written(5) == written(5)
    assert written(5) != written(6)
