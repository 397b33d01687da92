"""A Llama of transformers, as it is and with LayerZero: time of a prefill and of a decode step, and whether they agree.

    python bench/gpu/llama.py --out results

Llama-3-8B's geometry with four layers and random weights, bfloat16. LayerZero serves attention, norms and the
activation of the MLP; projections, rotary embedding and cache are those of transformers in all variants. It is tuned
on the model's own calls first. The other variants are the same model with ``sdpa``, and that one compiled.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import layerzero as lz
import torch
from variants import NAME, Step, build, decode, prefill, shared, with_layerzero

PREFILL = ((1, 512), (1, 2048), (1, 8192))
DECODE = (1, 16, 64)
CONTEXT = 1024


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Clock:
    """Times steps, by events where there is a device."""

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def ms(self, step: Step) -> float:
        """Milliseconds of one step that begins on an idle device, the host's share included."""
        if not self._cuda:
            begun = time.perf_counter()
            step()
            return (time.perf_counter() - begun) * 1e3
        torch.cuda.synchronize()
        self._begin.record()
        step()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))

    def rounds(self, steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
        """The median of each, timed in turn."""
        names = list(steps)
        for step in steps.values():
            for _ in range(3):
                step()
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                times[name].append(self.ms(steps[name]))
        return {name: statistics.median(seen) for name, seen in times.items()}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in what takes longer."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def agreement(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """How far two results are apart, and how often they would say the same token."""
    a, b = a.float(), b.float()
    return {
        "max_abs": float((a - b).abs().max()),
        "mean_abs": float((a - b).abs().mean()),
        "same_argmax": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        "largest": float(b.abs().max()),
    }


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]


class Run:
    """All parts, each on its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device: str = options.device
        self._folder = Path(options.out)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = Clock(self._device)
        self._compiling_left: float = options.compile_seconds
        self._compiled: Any = None
        self.result: dict[str, Any] = {"environment": self._environment(), "rows": [], "agreement": {}, "failures": {}}

    def _environment(self) -> dict[str, Any]:
        import transformers

        gpu = torch.cuda.get_device_name() if self._device != "cpu" else "none"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "layerzero": lz.__version__}
        return {"gpu": gpu, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), **versions}

    def run(self) -> None:
        """Builds, tunes, compares, times."""
        lz.configure(perfdb={"path": str(self._folder / "llama.sqlite")})
        self._plain = build(self._device, self._options.tiny)
        self._ours = with_layerzero(self._plain)
        say(f"built: {sum(p.numel() for p in self._plain.parameters()) / 1e9:.2f} billion weights")
        scale = 8 if self._options.tiny else 1
        prompts = [(batch, seq // scale) for batch, seq in PREFILL]
        context = CONTEXT // scale
        batches = DECODE[:2] if self._options.tiny else DECODE
        steps = [("prefill", batch, seq) for batch, seq in prompts] + [("decode", batch, context) for batch in batches]
        self._part("tune", lambda: self._tune(steps))
        self._part("agreement", lambda: self._agree(*prompts[0]))
        for step in steps:
            self._part(" ".join(map(str, step)), partial(self._time, *step))
        self._part("kernels", self._kernels)
        # Last, since it may take long: with all three in turn.
        for step in reversed(steps):
            self._part("compiled " + " ".join(map(str, step)), partial(self._time, *step, compiled=True))

    def _part(self, name: str, part: Callable[[], None]) -> None:
        begun = time.perf_counter()
        try:
            with torch.no_grad():
                part()
        except Exception as error:  # noqa: BLE001 - the other parts go on
            self.result["failures"][name] = _said(error)
            say(f"{name} failed: {_said(error)}")
        say(f"{name}: {time.perf_counter() - begun:.1f} s")
        self.write()

    def _tokens(self, batch: int, seq: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(batch * 100003 + seq)
        return torch.randint(0, self._plain.config.vocab_size, (batch, seq), generator=generator, device=self._device)

    def _step(self, model: Any, kind: str, batch: int, seq: int) -> Step:
        tokens = self._tokens(batch, seq)
        return prefill(model, tokens) if kind == "prefill" else decode(model, self._plain, tokens)

    def _tune(self, steps: Sequence[tuple[str, int, int]]) -> None:
        """The calls are seen by making them once."""
        for step in steps:
            self._step(self._ours, *step)()
        kind = "cpu" if self._device == "cpu" else "cuda"
        calls = [entry.call for entry in lz.manifest() if entry.device.startswith(kind)]
        say(f"{len(calls)} kinds of calls")
        tuned, impossible = [], []
        until = time.perf_counter() + self._options.tune_seconds
        for i, call in enumerate(calls):
            share = max((until - time.perf_counter()) / (len(calls) - i), 0.2)
            try:
                report = lz.tune(calls=[call], device=self._device, budget=share, force=True, progress=False)
            except Exception as error:  # noqa: BLE001 - the other calls are tuned all the same
                impossible.append([call["op"], _said(error)])
                continue
            impossible += [[one.call["op"], one.why] for one in report.impossible]
            kept = ("op", "label", "baseline", "chosen", "times_baseline", "out")
            tuned += [{key: row[key] for key in kept} for row in (t.to_dict() for t in report.tuned)]
        self.result["tuned"], self.result["impossible"] = tuned, impossible

    def _agree(self, batch: int, seq: int) -> None:
        """Against the same model in float32; what transformers' own variants differ by is the yardstick."""
        tokens = self._tokens(batch, seq)

        def logits(model: Any) -> torch.Tensor:
            return model(input_ids=tokens, use_cache=False).logits

        plain, ours = logits(self._plain), logits(self._ours)
        found = self.result["agreement"]
        found["layerzero / sdpa"] = agreement(ours, plain)
        found["eager / sdpa"] = agreement(logits(shared(self._plain, "eager")), plain)
        wide = copy.deepcopy(self._plain).float()
        right = logits(wide)
        found["layerzero / float32"] = agreement(ours, right)
        found["sdpa / float32"] = agreement(plain, right)
        del wide
        for count in DECODE[:2]:
            context = seq
            a, b = (self._step(model, "decode", count, context)() for model in (self._ours, self._plain))
            found[f"decode {count}: layerzero / sdpa"] = agreement(a, b)

    def _time(self, kind: str, batch: int, seq: int, compiled: bool = False) -> None:
        steps = {name: self._step(m, kind, batch, seq) for name, m in (("sdpa", self._plain), (NAME, self._ours))}
        row = self._row(kind, batch, seq)
        if compiled:
            try:
                steps["compiled"] = self._compiled_step(kind, batch, seq)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is its result
                row["compile_error"] = _said(error)
                say(f"  {_said(error)}")
                return
        times = self._clock.rounds(steps, 15 if kind == "prefill" else 31)
        row["ms"] = times
        row["times_sdpa"] = times["sdpa"] / times[NAME]
        if compiled:
            row["times_compiled"] = times["compiled"] / times[NAME]

    def _row(self, kind: str, batch: int, seq: int) -> dict[str, Any]:
        named = {"step": kind, "batch": batch, "seq": seq}
        for row in self.result["rows"]:
            if named.items() <= row.items():
                found: dict[str, Any] = row
                return found
        self.result["rows"].append(named)
        return named

    def _compiled_step(self, kind: str, batch: int, seq: int) -> Step:
        """The compiled model at this size, run twice; all of compiling has a limit together."""
        if self._compiling_left <= 1.0:
            raise TimeoutError("the time for compiling is spent")
        begun = time.perf_counter()
        try:
            with within(self._compiling_left):
                if self._compiled is None:
                    self._compiled = torch.compile(shared(self._plain, "sdpa"))
                step = self._step(self._compiled, kind, batch, seq)
                step()
                step()
                return step
        finally:
            self._compiling_left -= time.perf_counter() - begun

    def _kernels(self) -> None:
        served = sorted(lz.health().to_dict()["kernels"], key=lambda kernel: -kernel["calls"])
        self.result["kernels"] = {kernel["kernel"]: kernel["calls"] for kernel in served[:12]}

    def write(self) -> None:
        """Everything found so far."""
        path = self._folder / "llama.json"
        fresh = path.with_suffix(".json.new")
        fresh.write_text(json.dumps(self.result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, path)

    def show(self) -> None:
        """A short table."""
        print(" · ".join(f"{name} {value}" for name, value in self.result["environment"].items()))
        for name, found in self.result["agreement"].items():
            print(f"{name:32} max |a-b| {found['max_abs']:.4f}, same argmax {found['same_argmax']:.1%}")
        for one in self.result.get("tuned", []):
            ratio = f"{one['times_baseline']:.2f}" if one["times_baseline"] else "–"
            print(f"tuned {ratio:>6} × {one['label'][:70]}: {one['chosen']}")
        for name, why in self.result["failures"].items():
            print(f"failed: {name}: {why}")
        print(f"{'step':24}{'sdpa ms':>10}{'lz ms':>10}{'compiled':>10}{'× sdpa':>9}{'× compiled':>12}")
        for row in self.result["rows"]:
            ms = row.get("ms") or {}
            cells = [ms.get("sdpa"), ms.get(NAME), ms.get("compiled"), row.get("times_sdpa"), row.get("times_compiled")]
            shown = ["–" if cell is None else f"{cell:.3f}" for cell in cells]
            name = f"{row['step']} {row['batch']}×{row['seq']}"
            print(f"{name:24}{shown[0]:>10}{shown[1]:>10}{shown[2]:>10}{shown[3]:>9}{shown[4]:>12}")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="the folder for everything that is written")
    parser.add_argument("--tune-seconds", type=float, default=30.0, help="how long tuning may take (30)")
    parser.add_argument("--compile-seconds", type=float, default=90.0, help="how long all compiling may take (90)")
    parser.add_argument("--device", default="cuda", help="the device (cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command itself")
    run = Run(parser.parse_args(arguments))
    run.run()
    run.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
