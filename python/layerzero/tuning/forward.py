"""How long the calls of a forward pass take with torch's kernels and with the chosen ones, and what stays as it is."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from layerzero import _native
from layerzero.errors import LayerZeroError
from layerzero.results import Result

#: How often a forward pass is run to time it, and for how long at most (seconds).
ROUNDS, MOST_S = 9, 5.0


@dataclass(frozen=True, slots=True, repr=False)
class Forward(Result):
    """The calls of a model before and after, each weighted by how often it is made."""

    before_us: float
    """The sum over the calls of count × the median latency of what plain torch runs."""
    after_us: float
    """The same sum with the kernels that are chosen now."""
    calls: int
    """How many calls are in the sums, counted as often as they are made."""
    unknown: int
    """How many are not: their latency is not known, or plain torch has no kernel for them."""
    improved_us: float
    """Of ``before_us``, the calls for which another kernel than torch's is chosen and faster."""
    module_us: float | None
    """The measured latency of the module's forward pass, as it is written; ``None`` where it could not be run."""
    coverage: dict[str, float] | None
    """Which share of the FLOPs and of the bytes moved all the calls are."""

    @property
    def fixed(self) -> float:
        """The share that cannot be improved: calls that plain torch serves best, and what no operation computes.

        Of the module's measured time; where that is not known, of ``before_us``.
        """
        whole = max(self.before_us, self.module_us or 0.0)
        return 1.0 - self.improved_us / whole if whole > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {**Result.to_dict(self), "fixed": self.fixed}

    def __str__(self) -> str:
        sums = f"forward: {_time(self.before_us)} by torch's kernels, {_time(self.after_us)} by the chosen ones"
        left = f", {self.unknown} of unknown latency" if self.unknown else ""
        whole = f"the module's {_time(self.module_us)}" if self.module_us is not None else "that"
        return f"{sums} (count × median of {self.calls} calls{left}); {self.fixed:.0%} of {whole} cannot be improved"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e4 else f"{us:.1f} µs"


def of(
    passes: Mapping[str, int], coverage: dict[str, float] | None, device: int, run: Callable[[], Any] | None = None
) -> Forward:
    """What is known now of the calls of a model's forward passes, each with how often it is made."""
    before = after = improved = 0.0
    calls = unknown = 0
    for spec, count in passes.items():
        known = _times(spec, device)
        if known is None:
            unknown += count
            continue
        torchs, chosen, same = known
        calls += count
        before += count * torchs
        after += count * chosen
        improved += 0.0 if same or chosen >= torchs else count * torchs
    latency = module_us(run) if run is not None else None
    return Forward(before, after, calls, unknown, improved, latency, coverage)


def _times(spec: str, device: int) -> tuple[float, float, bool] | None:
    """The latency of what plain torch runs and of the choice, and whether they are the same kernel."""
    try:
        data = json.loads(_native.explain_call(spec, device)[0])
    except LayerZeroError:
        return None
    times = {candidate["kernel_id"]: candidate["time_us"] for candidate in data["candidates"]}
    torchs, chosen = times.get(data.get("baseline")), times.get(data["chosen"])
    if torchs is None or chosen is None:
        return None
    return torchs, chosen, data["chosen"] == data["baseline"]


def module_us(run: Callable[[], Any]) -> float | None:
    """The median latency of a forward pass; ``None`` where it fails. Random numbers are drawn as if it had not run."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

    def finish() -> None:
        if accelerator is not None:
            torch.accelerator.synchronize()

    kind = accelerator.type if accelerator is not None else "cpu"
    devices = [torch.accelerator.current_device_index()] if accelerator is not None else []
    with torch.random.fork_rng(devices, device_type=kind if accelerator is not None else "cuda"):
        try:
            run()
        # What the module raises is its own affair: it is not what is measured.
        except Exception:  # noqa: BLE001
            return None
        finish()
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < ROUNDS and (not times or time.perf_counter() - started < MOST_S):
            began = time.perf_counter()
            run()
            finish()
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
