"""The loop of examples/serving.py over LayerZero and over plain torch: tokens per second.

    python bench/gpu/serving_loop.py --json serving_loop.json
    python bench/gpu/serving_loop.py --device cpu --tiny

The same model, the same requests, the same loop with CUDA graphs for decode; only the operations differ. The loops run one
after the other in every round, so that a machine that becomes slower does so for both. The first rounds, in which kernels are
compiled, measured and captured, are not counted. A row has the median over the rounds of

    tokens/s   answered tokens over the time from the first prefill to the last answer
    ratio      tokens/s with LayerZero over tokens/s with torch, of the same round

and how many answers of both loops are the same, token by token. In bfloat16 kernels round differently, so answers part where
two tokens are nearly as likely; in float32 on a CPU they are equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import layerzero as lz
import torch


def _example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "serving.py"
    spec = importlib.util.spec_from_file_location("serving_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


serving = _example()

#: The requests of a row: how many at once, tokens of the common prefix, of the rest of each prompt, and of each answer.
ROWS = {
    "1 request": {"batch": 1, "prefix": 0, "prompt": 512, "answer": 128},
    "16 requests": {"batch": 16, "prefix": 0, "prompt": 512, "answer": 128},
    "64 requests": {"batch": 64, "prefix": 0, "prompt": 512, "answer": 128},
    "64 requests, a common prefix of 1024": {"batch": 64, "prefix": 1024, "prompt": 128, "answer": 128},
}


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def config(options: argparse.Namespace) -> Any:
    """Llama-3-8B's sizes with fewer layers, or tiny ones."""
    if options.tiny:
        return serving.Config(longest=256)
    sizes = {"vocab": 128256, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
    return serving.Config(**sizes, layers=options.layers, longest=2048, theta=500_000.0)


def sizes(row: dict[str, int], tiny: bool) -> dict[str, int]:
    """A row's sizes; of the tiny model an eighth of them."""
    return row if not tiny else {name: -(-size // 8) for name, size in row.items()}


def asked(row: dict[str, int], vocab: int, seed: int) -> list[Any]:
    """Requests of a row. Prompts differ between rounds, so that no round finds its prompts in the cache."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=generator).tolist()  # type: ignore[no-any-return]

    prefix = tokens(row["prefix"])
    return [serving.Request(prefix + tokens(row["prompt"]), row["answer"]) for _ in range(row["batch"])]


def timed(loop: Any, requests: list[Any]) -> float:
    """Seconds until all of them are answered, from an idle device."""
    for request in requests:
        loop.add(request)
    _wait(loop)
    begun = time.perf_counter()
    loop.run()
    _wait(loop)
    return time.perf_counter() - begun


def _wait(loop: Any) -> None:
    if loop.model.device.type == "cuda":
        torch.cuda.synchronize()


def measure(model: Any, name: str, row: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """One row by both loops."""
    pages = 1 + row["batch"] * (-(-(row["prefix"] + row["prompt"] + row["answer"]) // options.page_size))
    loops = {
        by: serving.Loop(
            model, operations, pages=pages, page_size=options.page_size, max_batch=row["batch"], graphs=options.graphs
        )
        for by, operations in serving.OPERATIONS.items()
    }
    seconds: dict[str, list[float]] = {by: [] for by in loops}
    same = total = 0
    begun, warm, seed = time.perf_counter(), 0, 0
    while len(seconds["torch"]) < options.rounds:
        seed += 1
        answers = []
        counts = warm >= 2 and time.perf_counter() - begun >= options.warm_seconds
        for by in sorted(loops, reverse=seed % 2 == 0):
            requests = asked(row, model.config.vocab, seed)
            took = timed(loops[by], requests)
            answers.append([request.answer for request in requests])
            if counts:
                seconds[by].append(took)
        warm += not counts
        same += sum(one == other for one, other in zip(*answers, strict=True))
        total += row["batch"]
    answered = row["batch"] * row["answer"]
    ratios = [theirs / ours for ours, theirs in zip(seconds["layerzero"], seconds["torch"], strict=True)]
    return {
        "row": name,
        **row,
        "tokens_per_s": {by: answered / statistics.median(each) for by, each in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "same_answers": same / total,
    }


def tune(model: Any, options: argparse.Namespace) -> None:
    """Measures the kernels for the calls of all rows, inside graphs where the loop uses them. A graph keeps its kernels."""
    begun = time.perf_counter()
    for name in options.rows:
        row = sizes(ROWS[name], options.tiny)
        count = 1 + row["batch"] * (-(-(row["prefix"] + row["prompt"] + row["answer"]) // options.page_size))
        loop = serving.Loop(model, pages=count, page_size=options.page_size, max_batch=row["batch"], graphs=False)
        timed(loop, asked({**row, "answer": 2}, model.config.vocab, 0))
    calls = [entry.call for entry in lz.manifest() if entry.device.startswith(model.device.type)]
    for index, call in enumerate(calls):
        share = (options.tune_seconds - (time.perf_counter() - begun)) / (len(calls) - index)
        try:
            graph = options.graphs and model.device.type == "cuda"
            lz.tune(calls=[call], device=str(model.device), graph=graph, budget=max(share, 0.2), progress=False)
        except Exception as error:  # noqa: BLE001 - the other calls are tuned all the same
            say(f"tune {call['op']}: {type(error).__name__}: {error}"[:200])
    say(f"tuned {len(calls)} kinds of calls in {time.perf_counter() - begun:.0f} s")


def environment(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The machine, the libraries, and what was run."""
    gpu = torch.cuda.get_device_name() if model.device.type == "cuda" else "none"
    found = {"gpu": gpu, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    found |= {"torch": torch.__version__, "layerzero": lz.__version__, "dtype": str(model.dtype).removeprefix("torch.")}
    graphs = options.graphs and model.device.type == "cuda"
    return {
        **found,
        "layers": model.config.layers,
        "rounds": options.rounds,
        "graphs": graphs,
        "tuned": bool(options.tune_seconds),
        "tiny": options.tiny,
    }


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| | LayerZero, tokens/s | torch, tokens/s | ratio | same answers |", "|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        ours, theirs = (f"{row['tokens_per_s'][by]:,.0f}" for by in ("layerzero", "torch"))
        lines.append(f"| {row['row']} | {ours} | {theirs} | {row['ratio']:.2f}× | {row['same_answers']:.0%} |")
    lines += [f"- {name}: {why}" for name, why in result["failures"].items()]
    return "\n".join(lines)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32, help="how many of the 32 layers to build")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each loop")
    parser.add_argument("--warm-seconds", type=float, default=20.0, help="how long a row runs before it is timed")
    parser.add_argument("--tune-seconds", type=float, default=0.0, help="measure kernels for these calls first")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and an eighth of the sizes, to test the script"
    )
    parser.add_argument("--json", help="a file for the result as data")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Runs and prints one table."""
    options = parsed(given)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = serving.Model(config(options), options.device, dtype)
    result: dict[str, Any] = {"environment": environment(options, model), "rows": [], "failures": {}}
    if options.tune_seconds:
        tune(model, options)
    for name in options.rows:
        try:
            row = measure(model, name, sizes(ROWS[name], options.tiny), options)
            result["rows"].append(row)
            say(f"{name}: {row['ratio']:.2f}")
        except Exception as error:  # noqa: BLE001 - the other rows go on
            result["failures"][name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
            say(f"{name}: {result['failures'][name]}")
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return result


if __name__ == "__main__":
    main()
