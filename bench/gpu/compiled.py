"""`lz.compile` on a GPU: a Llama of transformers, prefill and decode, beside torch.compile in its modes.

    python bench/gpu/compiled.py --layers 8 --json compiled.json

Llama-3-8B's geometry, random weights, bfloat16. Prefill is a pass over a prompt, with the logits of its last token. A step of
decode is one token for each sequence behind a context of 1024. The peers are the literal calls of a user:

    sdpa              the model as transformers makes it
    default, …        torch.compile(model, mode=…, dynamic=False), its cache of fixed size as `generate()` gives it
    layerzero         lz.compile(model): a call for prefill, the graph of `generate` for decode

Every step is timed from an idle device, the host's share included, the peers in turns; the median is given. Peers that are compiled come one by
one, within `--compile-seconds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layerzero as lz
import torch
from layerzero import _native
from models import build, decode, fixed_decode, prefill

CONTEXT = 1024
Step = Callable[[], Any]


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def milliseconds(step: Step) -> float:
    """One step that begins on an idle device, the host's share included."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        step()
        return (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


class Logits(torch.nn.Module):
    """The logits of a prompt's last token, as a module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The call."""
        found: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return found


class Run:
    """All rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, options.device
        self._model = build(options.device, options.layers, options.tiny)
        self._compiled = lz.compile(Logits(self._model).eval())
        self._decoded = lz.compile(self._model)
        self._left: float = options.compile_seconds
        self.rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}

    @torch.no_grad()
    def run(self) -> None:
        """Every row by every peer."""
        scale = 32 if self._options.tiny else 1
        for kind, batch, tokens in [
            *[("prefill", 1, length // scale) for length in self._options.prefill],
            *[("decode", batch, CONTEXT // scale) for batch in self._options.decode],
        ]:
            row = {"kind": kind, "batch": batch, "tokens": tokens, "ms": {}, "apart": {}}
            self.rows.append(row)
            self._row(row)
            self._write()
        if "torch.compile" in self._options.peers:
            for mode in self._options.modes:
                for row in self.rows:
                    self._torch_compiled(row, mode)
                    self._write()

    def _row(self, row: dict[str, Any]) -> None:
        tokens = self._tokens(row)
        of: dict[str, Callable[[], Step]] = {
            "sdpa": lambda: self._plain(row, tokens),
            "layerzero": lambda: self._ours(row, tokens),
        }
        steps: dict[str, Step] = {}
        for name in ("sdpa", "layerzero"):
            try:
                begun = time.perf_counter()
                steps[name] = of[name]()
                first = time.perf_counter() - begun
                row.setdefault("first_s", {})[name] = round(first, 2)
                results = [steps[name]() for _ in range(4)]
                row.setdefault("results", {})[name] = results[-1].float().reshape(row["batch"], -1).cpu()
            except Exception as error:  # noqa: BLE001 - the others go on
                self._failed(name, row, error)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self._options.rounds):
            for name, step in steps.items():
                step()
                times[name].append(milliseconds(step))
        row["ms"] |= {name: statistics.median(seen) for name, seen in times.items()}
        self._agree(row)
        say(self._text(row))

    def _plain(self, row: dict[str, Any], tokens: torch.Tensor) -> Step:
        if row["kind"] == "prefill":
            return prefill(self._model, tokens)
        return decode(self._model, self._model, tokens)

    def _ours(self, row: dict[str, Any], tokens: torch.Tensor) -> Step:
        compiled = self._compiled
        if row["kind"] == "prefill":
            compiled(tokens)
            return lambda: compiled(tokens)
        decoder = self._decoded.decoder()
        batch, length = tokens.shape
        cache = decoder.room(batch, length + 256)
        generator = torch.Generator(device=self._device).manual_seed(1)
        for keys, values in zip(cache[::2], cache[1::2], strict=True):
            for one in (keys, values):
                shape = (batch, one.shape[1], length, one.shape[3])
                one[:, :, :length] = torch.randn(shape, generator=generator, device=self._device, dtype=one.dtype)
        token, position = tokens[:, :1].clone(), torch.tensor([length], device=self._device)
        decoder.step(token, position, None, cache)
        return lambda: decoder.step(token, position, None, cache)

    def _torch_compiled(self, row: dict[str, Any], mode: str) -> None:
        if self._left <= 0:
            self.failures[f"{mode}, {self._name(row)}"] = "left out: the time for compiling is used up"
            return
        begun = time.perf_counter()
        try:
            torch._dynamo.reset()
            tokens = self._tokens(row)
            compiled = torch.compile(self._model, dynamic=False, mode=mode)
            step = (
                prefill(compiled, tokens) if row["kind"] == "prefill" else fixed_decode(compiled, self._model, tokens)
            )
            for _ in range(4):
                results = step()
            row["results"][mode] = results.float().reshape(row["batch"], -1).cpu()
            ours = self._ours(row, tokens)
            for _ in range(3):
                ours()
            times: dict[str, list[float]] = {mode: [], "layerzero": []}
            for _ in range(self._options.rounds):
                for name, one in ((mode, step), ("layerzero", ours)):
                    one()
                    times[name].append(milliseconds(one))
            row["ms"][mode] = statistics.median(times[mode])
            row["ms"][f"layerzero beside {mode}"] = statistics.median(times["layerzero"])
            self._agree(row)
        except Exception as error:  # noqa: BLE001 - the others go on
            self._failed(mode, row, error)
        self._left -= time.perf_counter() - begun
        say(f"{mode} ({time.perf_counter() - begun:.0f} s) {self._text(row)}")

    def _agree(self, row: dict[str, Any]) -> None:
        """How far the logits are from those of the model as it is, in parts of the largest."""
        right = row.get("results", {}).get("sdpa")
        if right is not None:
            for name, found in row["results"].items():
                row["apart"][name] = round(float((found - right).abs().max() / right.abs().max()), 4)

    def _failed(self, name: str, row: dict[str, Any], error: BaseException) -> None:
        self.failures[f"{name}, {self._name(row)}"] = f"{type(error).__name__}: {str(error)[:300]}"
        say(f"{name}, {self._name(row)}: {self.failures[f'{name}, {self._name(row)}']}")

    def _tokens(self, row: dict[str, Any]) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(row["batch"] * 100003 + row["tokens"])
        size = (row["batch"], row["tokens"])
        return torch.randint(0, self._model.config.vocab_size, size, generator=generator, device=self._device)

    @staticmethod
    def _name(row: dict[str, Any]) -> str:
        return f"{row['kind']} batch {row['batch']} tokens {row['tokens']}"

    def _text(self, row: dict[str, Any]) -> str:
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        return f"{self._name(row)}: ms: {times}; apart {row['apart']}; first {row.get('first_s')}"

    def _write(self) -> None:
        if self._options.json:
            rows = [{key: value for key, value in row.items() if key != "results"} for row in self.rows]
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
            about = {
                "gpu": gpu,
                "torch": torch.__version__,
                "layerzero": lz.__version__,
                "layers": self._options.layers,
            }
            data = {**about, "rows": rows, "failures": self.failures}
            Path(self._options.json).write_text(json.dumps(data, indent=1))

    def explain(self) -> None:
        """The kernels of the last prefill and of a step of decode, and what runs outside of graphs."""
        for compiled in (self._compiled, self._decoded.decoder()._compiled):
            if not compiled._variants:
                continue
            variant = compiled._variants[0]
            if isinstance(variant.session, _native.Session):
                continue
            for sizes in variant.session._known.values():
                if not sizes.runs:
                    continue
                kernels = [row["kernel"] for _, row in variant.session._rows(sizes)]
                counts = {name: kernels.count(name) for name in dict.fromkeys(kernels)}
                cut = None if sizes.captured is None else sizes.captured.cut
                say(
                    f"{len(kernels)} steps, captured {sizes.captured is not None}, {sizes.refused or cut or ''}: {counts}"
                )


def main() -> None:
    """Parses the command line, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 4096, 16384])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 16, 128])
    parser.add_argument("--peers", nargs="*", default=["torch.compile"])
    parser.add_argument("--modes", nargs="*", default=["default", "reduce-overhead", "max-autotune"])
    parser.add_argument("--compile-seconds", type=float, default=300.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    run = Run(options)
    run.run()
    run.explain()


if __name__ == "__main__":
    main()
