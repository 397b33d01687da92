"""Runs the kernels that are measured: on inputs of one call at a time."""

from __future__ import annotations

import json
import time

from layerzero import _native, devices, disk_caches
from layerzero.checks import synchronize
from layerzero.tuning.gate import Gate
from layerzero.tuning.inputs import Inputs, make
from layerzero.tuning.timing import CudaTimer


class Bench:
    """What :func:`_native.measure` asks: prepare a call, check its kernels, time them, and what of the times was whose."""

    def __init__(self) -> None:
        self._inputs: Inputs | None = None
        self._gate: Gate | None = None
        self._subject: _native.Subject | None = None
        self._cuda: CudaTimer | None = None
        self._call, self._device, self._mode = "", 0, "eager"
        self._jit: set[str] | None = None

    def prepare(self, call: str, device: int, mode: str) -> None:
        """Makes inputs for a call; those of the call before are let go first."""
        self._inputs = self._gate = self._subject = self._cuda = None
        self._call, self._device, self._mode = call, device, mode
        self._inputs = make(call, device)
        self._gate = Gate(self._inputs)
        self._subject = _native.Subject(self._inputs.function, self._inputs.copied())
        if (index := devices.cuda_index(device)) is not None:
            self._cuda = CudaTimer(self._subject, index, mode)
        elif mode != "eager":
            raise ValueError(f"the mode is {mode!r}: only CUDA devices replay graphs")

    def check(self, kernel: str) -> tuple[str, str | None, float | None, float | None]:
        """``("right", None, error, first call in ms)``, ``("wrong", why, …)`` or ``("failed", why, …)``."""
        assert self._gate is not None and self._subject is not None, "prepare comes first"
        jit = kernel in self._compiled_on_first_use()
        before = disk_caches.states() if jit else {}
        begun = time.perf_counter()
        try:
            given = self._subject.run(kernel)
            if self._device > 0:
                synchronize()
            warmup_ms = (time.perf_counter() - begun) * 1e3
            if jit:
                # It was compiled by that, and may serve at once.
                number = _native.jit_begin(kernel, self._call, self._device)
                _native.jit_done(number, warmup_ms, disk_caches.changed_since(before))
            # On a GPU it is run again: what a kernel leaves behind there may spoil its next call.
            worst, wrong = self._gate.judge(kernel, given if self._device == 0 else None)
            if wrong is None and self._cuda is not None and self._mode == "graph":
                worst, wrong = self._proven(kernel, worst)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its result
            return ("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", None, None)
        return ("wrong", wrong, worst, warmup_ms) if wrong else ("right", None, worst, warmup_ms)

    def _proven(self, kernel: str, worst: float) -> tuple[float, str | None]:
        """Whether a kernel that is right is so, too, when it is captured and replayed."""
        assert self._cuda is not None and self._gate is not None and self._inputs is not None, "prepare comes first"
        outputs = self._cuda.replayed(kernel)
        if self._inputs.updated or self._inputs.kind == "sampling":
            # A second run of what it updates is not the first; a draw is judged by the tokens, which differ.
            return (worst, None)
        given = outputs if isinstance(outputs, tuple | list) else (outputs,)
        again, wrong = self._gate.judge_results(tuple(given))
        return (max(worst, again), wrong and f"replayed in a CUDA graph it {wrong}")

    def _compiled_on_first_use(self) -> set[str]:
        if self._jit is None:
            self._jit = {k["kernel_id"] for k in json.loads(_native.list_kernels()) if k["jit"]}
        return self._jit

    def time(self, kernel: str, calls: int) -> float:
        """Microseconds of one call."""
        assert self._subject is not None, "prepare comes first"
        if self._cuda is not None:
            return self._cuda.time(kernel, calls)
        if self._device > 0:
            # Of other accelerators: from the first call until the device has done them all, on the host's clock.
            synchronize()
            begun = time.perf_counter()
            self._subject.time(kernel, calls)
            synchronize()
            return (time.perf_counter() - begun) * 1e6 / max(calls, 1)
        return self._subject.time(kernel, calls)

    def parts(self, kernel: str) -> list[tuple[float, float]] | None:
        """What of that the host took and the device in each sample, where both work at the same time."""
        return self._cuda.parts(kernel) if self._cuda is not None else None
