"""The threads that native kernels run on: torch's own, at most `num_threads`, and none of the parent's after a fork."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
from processes import answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")

#: A call large enough for several threads, served by a native kernel, against float64.
_CALL = """
import os, signal, threading
from pathlib import Path
import torch
import layerzero as lz

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
gate, up = (torch.randn(256, 2048, generator=generator) for _ in range(2))
right = torch.nn.functional.silu(gate.double()) * up.double()
torch.set_num_threads(2)

def names():
    return sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())

def call():
    with lz.prefer("lz_cpu"):
        result = lz.silu_mul(gate, up)
        assert lz.which("silu_mul", gate, up).kernel_id.startswith("lz_cpu."), lz.which("silu_mul", gate, up)
    # By numpy: torch would start its threads for it.
    return bool(abs(result.numpy().astype("float64") - right.numpy()).max() < 1e-5)
"""


def test_kernels_run_on_torchs_threads() -> None:
    """One more thread than before, which torch's next call uses as well. Of one call: behind a late one the pool has its turn."""
    code = _CALL + "was = call()\nmine = names()\ntorch.nn.functional.silu(gate)\nanswer([was, mine, names()])"
    right, ours, with_torch = answer(code)
    assert right
    assert not any(name.startswith("lz-cpu") for name in ours), ours
    assert with_torch == ours


def test_a_limit_of_one_thread_starts_none() -> None:
    limited, plain = (
        answer(f"{_CALL}\nlz.configure(num_threads={limit})\nwas = len(names())\nanswer([call(), len(names()) - was])")
        for limit in (1, 0)
    )
    assert limited == [True, 0]
    assert plain == [True, 1]


def test_a_limit_counts_for_calls_that_are_remembered() -> None:
    """Without threads at first: what a call remembers must not keep it from using them, nor the other way round."""
    code = """
    lz.configure(num_threads=1)
    was, results = len(names()), [call(), call()]
    alone = len(names()) - was
    lz.configure(num_threads=0)
    results.append(call())
    answer([results, alone, len(names()) - was > 0])
    """
    assert answer(_CALL + dedent(code)) == [[True] * 3, 0, True]


def test_a_limit_below_torchs_is_served_by_threads_of_our_own() -> None:
    """A team of OpenMP is always as large as torch's. That no more threads run is tested in Rust."""
    code = _CALL + "torch.set_num_threads(3)\nlz.configure(num_threads=2)\nanswer([call(), call()])"
    assert answer(code) == [True, True]


def test_a_child_process_waits_for_nobody() -> None:
    """OpenMP would wait for the parent's threads for good."""
    code = """
    assert call()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if call() else 1)
    answer([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), call()])
    """
    assert answer(_CALL + dedent(code)) == [0, True]


def test_callers_on_many_threads_are_all_right() -> None:
    code = """
    seen = []
    callers = [threading.Thread(target=lambda: seen.append(all(call() for _ in range(20)))) for _ in range(4)]
    for caller in callers: caller.start()
    for caller in callers: caller.join()
    answer(seen)
    """
    assert answer(_CALL + dedent(code)) == [True] * 4
