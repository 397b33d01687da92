"""Whatever is passed to a public function, the process goes on: see hostile.py."""

from __future__ import annotations

import os
from pathlib import Path

import layerzero as lz
import pytest
from processes import SUPPORT, forked, python

#: Cases by LZ_TEST_SCALE, in processes of at most so many.
CASES = {"smoke": 100, "quick": 200, "full": 10_000}[os.environ.get("LZ_TEST_SCALE", "quick")]
PER_PROCESS = 1000
SEED = 21


def batches() -> list[tuple[int, int]]:
    """The seed and the number of cases of each process."""
    whole, rest = divmod(CASES, PER_PROCESS)
    return [(SEED + i, PER_PROCESS) for i in range(whole)] + ([(SEED + whole, rest)] if rest else [])


@pytest.mark.parametrize(("seed", "count"), batches())
def test_no_object_brings_the_process_down(seed: int, count: int, tmp_path: Path) -> None:
    under_way = tmp_path / "under_way"
    under_way.write_bytes(b"")
    program = SUPPORT / "hostile.py"
    here = Path.cwd()
    try:
        # Paths among the arguments are relative to a folder of their own.
        os.chdir(tmp_path)
        done = python(program, str(seed), str(count), under_way, path=[program.parent], timeout=3600)
    finally:
        os.chdir(here)
    case = under_way.read_text()
    assert done.returncode == 0, f"ended with {done.returncode} in {case}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


_SETTINGS = """
import layerzero as lz
a = []; a.append(a)
d = {{}}; d["x"] = d
deep = "x"
for _ in range(100_000): deep = [deep]
wide = "x"
for _ in range(30): wide = [wide, wide]
told = []
for value in (a, d, deep, wide, {{"x": a}}, [d]):
    try:
        {call}
        told.append("taken")
    except (lz.ConfigurationError, TypeError, ValueError, RecursionError) as error:
        told.append(getattr(error, "code", type(error).__name__))
answer(told)
"""
CALLS = {
    "configure": "lz.configure(prefer_sources=value)",
    "section": "lz.configure(breaker=value)",
    "rules": "lz.configure(rules=value)",
    "prefer": "lz.prefer(value).__enter__()",
    "table": "lz.load_table(value)",
    "kernel": "lz.register_kernel(operation='norm.rms', kernel_id='t.x', platform='cpu', supported_dtypes=['float32'], dims=value)(lambda input: input)",
}


@pytest.mark.parametrize("call", CALLS)
def test_containers_that_contain_themselves_are_refused(call: str) -> None:
    assert "taken" not in forked(_SETTINGS.format(call=CALLS[call]))


def test_a_setting_says_why_it_is_refused() -> None:
    a: list[object] = []
    a.append(a)
    with pytest.raises(lz.ConfigurationError, match="nested more than 32 deep"):
        lz.configure(prefer_sources=a)


def test_texts_that_are_no_values_are_not_kept() -> None:
    """Interned names live as long as the process."""
    import torch
    from layerzero import _native

    x = torch.ones(4, 8)
    lz.rms_norm(x)
    before = _native.status()["names_interned"]
    for i in range(100):
        with pytest.raises(lz.ArgumentTypeError, match="expected one of"):
            lz.quantize(x, f"no dtype {i}")
        with pytest.raises(lz.ArgumentTypeError):
            lz.rms_norm(x, eps=f"no number {i}")
    assert _native.status()["names_interned"] == before
