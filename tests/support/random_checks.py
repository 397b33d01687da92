"""Random modules compiled in every way, and compared with torch: what is wrong with one, and the smallest module that shows it."""

from __future__ import annotations

import copy
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import layerzero as lz
import torch
from layerzero import _native
from layerzero.device_graphs.session import DeviceSession
from layerzero.errors import ExportError
from layerzero.export import Exported, export
from random_modules import SIZES, Program, names_in, without_dead_layers, written
from recorded_graphs import RecordedGraphs
from torch import Tensor, nn

#: What rounding may do to a result, relative to its greatest number: of the coarsest type that a module computes in.
ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
#: What torch.export says of modules that no graph can hold: not our refusals.
_TORCHS = ("torch.export cannot trace", "is control flow", "depends on the data", "complex")


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a module."""

    #: ``numbers``, ``crash``, ``refused``, ``inputs``.
    kind: str
    #: Which way of running it.
    way: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.way}): {self.text}"


class _Disagreement(AssertionError):
    pass


def doubled(value: Any) -> Any:
    """The same in float64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(module: nn.Module, args: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the arguments afterwards."""
    given = copied(args)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = module(*given)
    return list(results), given


def copied(args: list[Tensor]) -> list[Tensor]:
    """The same tensors with their strides, in other memory."""
    return [copy.deepcopy(one) for one in args]


class Truth:
    """What torch gives, and how far that is from being certain: by float64, and by inputs that are a little different."""

    def __init__(self, module: nn.Module, args: list[Tensor], rounding: float) -> None:
        self.results, self.after = _run(copy.deepcopy(module), args)
        self.doubt = [torch.zeros(one.shape, dtype=torch.float64) for one in self.results]
        self.unsure = [torch.zeros(one.shape, dtype=torch.bool) for one in self.results]
        self.rounding = rounding
        self._doubted = False
        self._module, self._args = module, args

    def _doubts(self) -> None:
        """Runs the module in other precisions; its own numbers are as doubtful as these differ."""
        self._doubted = True
        others = []
        wide = copy.deepcopy(self._module).double()
        try:
            others.append(_run(wide, [doubled(one) for one in self._args])[0])
        except RuntimeError:
            pass
        for sign in (1, -1):
            nudged = [
                one * (1 + sign * min(self.rounding, 0.05) * torch.sign(torch.randn(one.shape)).to(one.dtype))
                + sign * 1e-30
                if one.is_floating_point()
                else one
                for one in self._args
            ]
            others.append(_run(copy.deepcopy(self._module), nudged)[0])
            moved = copy.deepcopy(self._module)
            with torch.no_grad():
                for weight in moved.parameters():
                    weight.mul_(1 + sign * self.rounding / 4)
            others.append(_run(moved, self._args)[0])
        for other in others:
            for at, (one, two) in enumerate(zip(self.results, other, strict=True)):
                if one.shape != two.shape:
                    self.unsure[at].fill_(True)
                    continue
                a, b = one.double(), two.double()
                self.unsure[at] |= (a.isnan() != b.isnan()) | (a.isinf() != b.isinf())
                gap = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
                self.doubt[at] = torch.maximum(self.doubt[at], gap)

    def compare(self, found: list[Any]) -> None:
        """Raises an error where results are others."""
        if len(found) != len(self.results):
            raise _Disagreement(f"{len(found)} results, not {len(self.results)}")
        for at, (one, wanted) in enumerate(zip(found, self.results, strict=True)):
            if (one.dtype, one.shape) != (wanted.dtype, wanted.shape):
                raise _Disagreement(
                    f"result {at} is {one.dtype}{list(one.shape)}, not {wanted.dtype}{list(wanted.shape)}"
                )
            worst = self._worst(at, one)
            if worst is not None and not self._doubted:
                self._doubts()
                worst = self._worst(at, one)
            if worst is not None:
                raise _Disagreement(f"result {at}{worst}")

    def _worst(self, at: int, found: Tensor) -> str | None:
        wanted = self.results[at]
        if wanted.numel() == 0:
            return None
        a, b = found.double(), wanted.double()
        finite = b[b.isfinite()].abs()
        greatest = max(1.0, float(finite.max())) if finite.numel() else 1.0
        exact = not wanted.is_floating_point()
        bound = (0.0 if exact else self.rounding * greatest) + 8 * self.doubt[at]
        # A whole number that a little rounding changes may be another one.
        same = ((a - b).abs() <= bound) | (a == b) | (a.isnan() & b.isnan()) | self.unsure[at]
        if exact:
            same |= self.doubt[at] > 0
        if bool(same.all()):
            return None
        # Integers that follow from a doubtful one may be anything.
        place = tuple(int(i) for i in (~same).nonzero()[0]) if a.dim() else ()
        return f"{list(place)}: {found[place].item()!r} in the place of {wanted[place].item()!r} ({int((~same).sum())} of {same.numel()})"


def _rounding(program: Program, module: nn.Module) -> float:
    """How coarse the numbers are that a module computes with."""
    seen = {one.dtype for one in program.inputs} | {one.dtype for one in module.parameters()}
    text = program.source()
    if "half" in text or torch.float16 in seen:
        seen.add(torch.float16)
    if "bfloat16" in text or torch.bfloat16 in seen:
        seen.add(torch.bfloat16)
    if "float64" not in text and seen.isdisjoint({torch.float16, torch.bfloat16}):
        seen.add(torch.float32)
    return max(ROUNDING.get(one, 0.0) for one in seen)


def _session(exported: Exported, off: list[str]) -> Any:
    graph = _native.Graph.from_document(exported.document, exported.constants)
    return _native.Session(graph, threads=2, off=off)


class Check:
    """One module in all its ways. Counts what it does, so that a run can say how much it has seen."""

    def __init__(self, program: Program, *, thorough: bool = True, count: Counter[str] | None = None) -> None:
        self.program, self.thorough = program, thorough
        self.count = Counter[str]() if count is None else count

    def run(self) -> Wrong | None:
        """What is wrong first."""
        self.way = "torch"
        try:
            module = self.program.module()
            truth = Truth(module, self.program.arguments(SIZES[0]), _rounding(self.program, module))
        except Exception:  # noqa: BLE001 - a made-smaller module that torch refuses
            return None
        try:
            self._ways(module, truth)
        except _Disagreement as raised:
            return Wrong("numbers", self.way, str(raised))
        except ExportError as raised:
            if any(text in str(raised) for text in _TORCHS):
                self.count["refused by torch.export"] += 1
                return None
            return Wrong("refused", self.way, str(raised))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it is wrong; a panic is no Exception
            last = traceback.extract_tb(raised.__traceback__)[-1]
            return Wrong("crash", self.way, f"{type(raised).__name__}: {str(raised)[:300]} ({last.name}:{last.lineno})")
        return None

    def _ways(self, module: nn.Module, truth: Truth) -> None:
        args = self.program.arguments(SIZES[0])
        self.way = "lz.compile"
        self.count["modules"] += 1
        # Weights are the model's own, and a graph must not change them.
        compiled = lz.compile(copy.deepcopy(module), *copied(args))
        for _ in range(2):
            given = copied(args)
            with torch.no_grad():
                truth.compare(list(compiled(*given)))
            self._unchanged(given, truth)
        self.count["runs"] += 2
        variant = compiled._variants[0]
        self.count["calls of torch"] += len(variant.exported.host_calls)
        if self.thorough:
            self._switched_off(variant.exported, truth, args)
        self._as_on_a_device(module, truth, args)
        # Most of the time goes to torch.export, which other sizes need once more.
        self._other_sizes(compiled, module, truth.rounding)

    def _unchanged(self, given: list[Tensor], truth: Truth) -> None:
        for at, (one, wanted) in enumerate(zip(given, truth.after, strict=True)):
            if not torch.equal(one.nan_to_num(), wanted.nan_to_num()):
                raise _Disagreement(f"the argument {at} is another one afterwards")

    def _switched_off(self, exported: Exported, truth: Truth, args: list[Tensor]) -> None:
        """Each pass that did something is left out; and all of them."""
        host = exported.host_calls if len(exported.host_calls) else None
        done = list(_session(exported, []).optimised["rewrites"])
        for off in [*([one] for one in done), done]:
            self.way = f"without {', '.join(off)}" if len(off) < 5 else "without any pass"
            found = _session(exported, off).run(exported.flatten(copied(args)), host)
            truth.compare(list(exported.unflatten(found)))
            self.count["runs without passes"] += 1

    def _as_on_a_device(self, module: nn.Module, truth: Truth, args: list[Tensor]) -> None:
        """By the steps that run graphs on devices, which run on the CPU too; weights are inputs. Run, captured and replayed."""
        self.way = "as on a device"
        exported = export(copy.deepcopy(module), copied(args), held=True)
        graph = _native.Graph.from_document(exported.document, exported.constants)
        held, host = len(exported.buffers) + len(exported.held), exported.host_calls
        for way, graphs in (("by steps", None), ("in graphs", RecordedGraphs())):
            session = DeviceSession(graph, torch.device("cpu"), held=held, host=host, graphs=graphs)
            for turn in range(1 if graphs is None else 3):
                self.way = f"as on a device, {way}, run {turn}"
                given = copied(args)
                truth.compare(list(exported.unflatten(session.run(exported.flatten(given)))))
                self._unchanged(given, truth)
                self.count["runs as on a device"] += 1

    def _other_sizes(self, compiled: Any, module: nn.Module, rounding: float) -> None:
        """The same compiled model with other batches and lengths."""
        for sizes in self.program.sizes:
            self.way = f"sizes {sizes}"
            args = self.program.arguments(sizes, seed=1)
            try:
                truth = Truth(module, args, rounding)
            except Exception:  # noqa: BLE001, S112 - torch refuses these sizes
                continue
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error", category=UserWarning)
                truth.compare(list(compiled(*copied(args))))
            self.count["other sizes"] += 1
        self.count["exports"] += len(compiled._variants)


def smaller(program: Program, wrong: Wrong, seconds: float = 120.0) -> tuple[Program, Wrong]:
    """The module with as few lines and results as still go wrong in the same way, as far as the time suffices."""
    best, last, until = program, wrong, time.monotonic() + seconds
    thorough = "without" in wrong.way

    def still(candidate: Program) -> bool:
        nonlocal best, last
        if len(candidate.script()) >= len(best.script()) and candidate.sizes == best.sizes:
            return False
        found = Check(candidate, thorough=thorough).run()
        same = found is not None and (found.kind, found.way.split()[0]) == (wrong.kind, wrong.way.split()[0])
        if found is not None and same:
            best, last = candidate, found
        return same

    # One other size is enough to show what is wrong with one.
    still(replace(program, sizes=tuple(one for one in program.sizes if wrong.way == f"sizes {one}")))
    while time.monotonic() < until and any(still(one) for one in _candidates(best) if time.monotonic() < until):
        pass
    return best, last


def needed(program: Program) -> Program:
    """The module without the lines and inputs that its results do not need."""
    wanted, lines = set(program.results), list[str]()
    for line in reversed(program.lines):
        written = names_in(line.partition(" = ")[0]) if " = " in line else names_in(line)
        if written & wanted:
            wanted |= names_in(line)
            lines.append(line)
    kept = tuple(one for one in program.inputs if one.name in wanted or one is program.inputs[0])
    return without_dead_layers(replace(program, lines=tuple(reversed(lines)), inputs=kept))


def _candidates(program: Program) -> list[Program]:
    """The module with less, what takes away most first."""
    found = [needed(program)]
    found += [needed(replace(program, results=(one,))) for one in program.results if len(program.results) > 1]
    # An earlier variable as the result.
    for at, line in enumerate(program.lines):
        for name in sorted(names_in(line.partition(" = ")[0])):
            if (name,) != program.results and " = " in line:
                found.append(needed(replace(program, lines=program.lines[: at + 1], results=(name,))))
    for at in reversed(range(len(program.lines))):
        found.append(without_dead_layers(replace(program, lines=program.lines[:at] + program.lines[at + 1 :])))
        # What the line made is one of the values it reads.
        left, _, right = program.lines[at].partition(" = ")
        for one in sorted(names_in(right) - names_in(left)):
            if left.isidentifier():
                found.append(
                    needed(replace(program, lines=(*program.lines[:at], f"{left} = {one}", *program.lines[at + 1 :])))
                )
    plain = tuple(replace(one, layout="") for one in program.inputs)
    return [*found, replace(program, inputs=plain)]


def failure(seed: int, *, count: Counter[str] | None = None, shrink: bool = True) -> str:
    """What is wrong with the module of a seed, with the smallest module that shows it; nothing if all is well."""
    program = written(seed)
    wrong = Check(program, count=count).run()
    if wrong is None:
        return ""
    small, last = smaller(program, wrong) if shrink else (program, wrong)
    return f"seed {seed}: {wrong}\n{last}\n\n{small.script()}"


def main(arguments: list[str]) -> int:
    """``random_checks.py FIRST COUNT``: checks the modules of these seeds, and prints what is wrong."""
    first, number = (int(one) for one in arguments[:2])
    torch.set_num_threads(1)
    # torch tells of every size that is 1.
    logging.getLogger("torch").setLevel(logging.ERROR)
    count: Counter[str] = Counter()
    bad = 0
    for seed in range(first, first + number):
        found = failure(seed, count=count, shrink="--whole" not in arguments)
        if found:
            bad += 1
            print(f"{found}\n{'-' * 60}", flush=True)
    print(f"{bad} of {number} are wrong; {dict(count)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
