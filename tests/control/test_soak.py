"""Many threads, many calls, one process: every result right, and nothing grows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


def load() -> ModuleType:
    """The soak of bench/, as a module."""
    spec = importlib.util.spec_from_file_location("layerzero_soak", SOAK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_eight_threads_get_right_results_and_nothing_grows() -> None:
    report = load().soak(threads=8, most=2500)
    assert report.calls == 8 * 2500
    assert (report.errors, report.wrong) == (0, 0), report.first_error
    # One leaked object, or 1 KiB, per call would show twenty times over.
    assert report.objects_growth < 1000, report
    assert report.blocks_growth < 1000, report
    assert report.rss_growth_bytes < 16 << 20, report


def test_a_wrong_result_and_an_error_are_noticed() -> None:
    """The soak itself can fail."""
    module = load()
    good = module.prepared()[0]

    def broken() -> None:
        raise ValueError("broken")

    wrong = module.Call("wrong", lambda: good.run() + 1, good.baseline)
    raising = module.Call("raising", broken, good.baseline)
    run = module.Soak([good, wrong, raising], threads=2)
    run.round(most=3)
    assert (sum(run.done), sum(run.wrong), sum(run.errors)) == (6, 2, 2)
    assert run.first_error is not None
