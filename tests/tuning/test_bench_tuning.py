"""`layerzero bench tuning`: the control that tells a bad choice from a slow moment of the machine."""

from __future__ import annotations

from itertools import count, cycle
from typing import Any

import pytest
from layerzero.bench import tuning


class Clock:
    """Times kernels by a table, in place of a machine: the time of the n-th sample is a function of n."""

    def __init__(self, **times: Any) -> None:
        self.times, self.prepared, self.samples = times, [], count()

    def prepare(self, call: str, device: int, mode: str) -> None:
        """Notes the call."""
        self.prepared.append((call, device, mode))

    def time(self, kernel: str, calls: int) -> float:
        """The time of a kernel."""
        assert calls >= 1
        taken = self.times[kernel]
        return float(taken(next(self.samples)) if callable(taken) else taken)


def row(label: str, over_best: float, times_baseline: float | None = 1.0, best: str = "fast") -> dict[str, Any]:
    """A row of regret: `slow` was chosen."""
    return {
        "label": label,
        "call": {"op": "activation.gelu", "label": label},
        "chosen": "slow",
        "chosen_us": 100.0 * over_best,
        "best": best,
        "baseline": "slow" if times_baseline is not None else None,
        "over_best": over_best,
        "times_baseline": times_baseline,
    }


def test_a_loss_that_comes_again_is_the_choices() -> None:
    (found,) = tuning.controlled([row("gelu", 1.36)], Clock(slow=136.0, fast=100.0))
    assert (found["again"], found["itself"], found["cause"]) == (pytest.approx(1.36), 1.0, "the choice")


def test_a_loss_that_does_not_come_again_is_the_machines() -> None:
    (found,) = tuning.controlled([row("gelu", 1.36)], Clock(slow=100.0, fast=100.0))
    assert (found["again"], found["cause"]) == (1.0, "the machine")


def test_a_loss_no_larger_than_the_control_is_the_machines() -> None:
    # Every other sample of the same kernel takes 1.3 times as long.
    jitter = cycle([100.0, 130.0])
    lost = row("gelu", 1.2, times_baseline=None)
    (found,) = tuning.controlled([lost], Clock(slow=lambda _: next(jitter), fast=100.0), rounds=1)
    assert max(found["itself"], 1 / found["itself"]) == pytest.approx(1.3) and found["cause"] == "the machine"


def test_a_choice_slower_than_plain_torch_is_measured_again() -> None:
    lost = row("norm", 1.0, 0.82, best="slow") | {"baseline": "torch"}
    (found,) = tuning.controlled([lost], Clock(slow=100.0, torch=82.0))
    assert (found["baseline_again"], found["cause"]) == (pytest.approx(0.82), "the choice")


def test_only_the_worst_are_measured_again() -> None:
    rows = [row(f"call {n}", 1.0 + n / 100) for n in range(20)]
    clock = Clock(slow=110.0, fast=100.0)
    found = tuning.controlled(rows, clock)
    assert [one["label"] for one in found] == [f"call {n}" for n in range(19, 19 - tuning.CONTROLS, -1)]
    assert len(clock.prepared) == tuning.CONTROLS


def test_without_losses_nothing_is_measured() -> None:
    assert tuning.controlled([row("gelu", 1.0)], Clock()) == []


def test_a_real_kernel_against_itself_is_a_tie_of_names() -> None:
    call = {"op": "activation.gelu", "tensors": {"input": {"dtype": "float32", "shape": [4, 64]}}}
    real = row("gelu", 1.1) | {"call": call, "chosen": "torch.gelu", "best": "torch.gelu", "baseline": "torch.gelu"}
    (found,) = tuning.controlled([real], rounds=3)
    assert found["again"] > 0 and found["itself"] > 0 and found["baseline_again"] > 0
