"""The story on the machine at hand: measure, remember, choose, explain, and see how good the choices are.

`make demo` runs this. It needs torch and transformers, no GPU, and about a minute.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.__main__ import main as layerzero

#: What is measured: operations of GPT-2 and of a small Llama, as their forward passes call them.
MODELS = {"gpt2": "float32", "llama-3.2-1b": "bfloat16"}
#: Where the forward passes are cut: these parts are enough to see what differs.
PARTS = ("attention", "norm", "silu_mul", "sampl", "linear")
#: Matrix products of more multiplications, or of wider weights (the vocabulary), are left out: they would take the whole time.
LARGEST, WIDEST = 10**9, 8192
FOLDER = Path("demo")


def heading(text: str) -> None:
    """A line that stands out, in colour where there is a terminal."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"\n{bold}{text}{plain}", flush=True)


def is_small(call: Mapping[str, Any]) -> bool:
    """Whether a linear layer is none of the largest: rows × features in × features out. Other calls are small."""
    if call["op"] != "mlp.linear":
        return True
    rows, weight = call["tensors"]["input"]["shape"][:-1], call["tensors"]["weight"]["shape"]
    return math.prod([*rows, *weight]) <= LARGEST and max(weight) <= WIDEST


def calls(seq: Iterable[int], context: Iterable[int]) -> list[dict[str, Any]]:
    """The calls of the models at these lengths, without the largest matrix products."""
    wanted = []
    for model, dtype in MODELS.items():
        traced = lz.workload(model=model, dtype=dtype, batch=[1], seq=list(seq), context=list(context), progress=True)
        wanted += [c for c in traced if any(part in c["op"] for part in PARTS) and is_small(c)]
    return wanted


def main() -> None:
    """Runs the whole story."""
    FOLDER.mkdir(exist_ok=True)
    # A database of its own, so that every run of the demo measures; yours is under the cache directory.
    database = FOLDER / "perfdb.sqlite"
    for old in FOLDER.glob("perfdb.sqlite*"):
        old.unlink()
    lz.configure(perfdb={"path": str(database.resolve())})

    heading("1. What machine is this, and which libraries are on it?")
    lz.doctor()

    heading("2. Every kernel that can serve is checked against the reference, then timed side by side")
    report = lz.tune(calls=calls(seq=[32, 256], context=[64, 1024]), budget="25s", progress=True)
    print(report)
    print("×baseline: how many times as fast as the kernel that plain torch runs")

    heading("3. Why that one? One decision in full")
    tuned = max(report.tuned, key=lambda t: t.times_baseline or 0.0)
    print(lz.explain_call(tuned))

    heading("4. How good are the choices for shapes nobody measured?")
    held_out = lz.regret(calls=calls(seq=[96], context=[320]), budget="12s", progress=True)
    print(held_out)
    print("÷best: the time of the choice ÷ the time of the best kernel; 1.000 is the best choice")
    (FOLDER / "regret.json").write_text(json.dumps(held_out.to_dict()), encoding="utf-8")

    heading("5. All of it as a page")
    page = FOLDER / "report.html"
    sys.argv = ["layerzero", "report", "--db", str(database), "-o", str(page), "--regret", str(FOLDER / "regret.json")]
    layerzero()
    print(f"open {page.resolve()} in a browser")

    heading("What next?")
    if Path(".venv/bin/activate").exists():
        print("  source .venv/bin/activate            use what was built here: the command and `import layerzero`")
    print("  layerzero tune --model gpt2          measure your model on your machine, for good")
    print("  layerzero lock                       write the decisions down, diffable, for production")
    print("  layerzero explain --op attention …   ask about any call; docs/measure.md has the rest")


if __name__ == "__main__":
    main()
