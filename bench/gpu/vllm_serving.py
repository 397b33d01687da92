"""vLLM with LayerZero's attention and with its own, side by side: the same answers, and tokens per second.

    python bench/gpu/vllm_serving.py --json vllm_serving.json
    python bench/gpu/vllm_serving.py --rows prefix --no-answers --tune-seconds 0 --profile --seconds 140
    python bench/gpu/vllm_serving.py --tiny                     # on vLLM's build for CPUs, to test the script

Every engine is a process. Those of one backend and one way to run (eager; CUDA graphs in pieces; full CUDA graphs for decode)
are built at the same time, then asked one at a time, so that no engine's work is in another's time.

Answers: a small Llama with random weights, float32 and bfloat16. Prompts with a common beginning come in chunks together with
running requests, with prefix caching. Each engine, vLLM's own too, is compared with transformers in float64, which is
given the engine's tokens:

    off     the largest |log p - log p'| of its tokens
    regret  the largest log p' of the likeliest token less that of its own: 0 for the tokens of float64, small for a near tie
    same    tokens before the first that differs from those of vLLM's own attention without graphs, over all tokens

Speed: Llama-3-8B's sizes with fewer layers and weights without meaning, bfloat16. The engines answer the same prompts in turns.
A row has the median over the rounds of answered tokens over seconds, and in brackets LayerZero's ratio to vLLM: of the medians,
then of the best rounds, which the other work of the host disturbs least. LayerZero is timed before and after its kernels were
measured for these calls (`lz.tune`); a captured graph keeps its kernels, so the second engine is a new process.

`--profile` adds what one step costs in each engine: of the prompts, and of one token per request. Its milliseconds on the wall
without a profiler, then, in a second run, kernels per step, their time on the device, and the kernels with the most time.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_engine import MODES, OURS, OWN, save

#: The requests of a row: how many at once, tokens of the common prefix, of the rest of each prompt, and of each answer.
ROWS = {
    "1 request": {"batch": 1, "prefix": 0, "prompt": 512, "answer": 128},
    "16 requests": {"batch": 16, "prefix": 0, "prompt": 512, "answer": 128},
    "64 requests": {"batch": 64, "prefix": 0, "prompt": 512, "answer": 128},
    "64 requests, a common prefix of 1024": {"batch": 64, "prefix": 1024, "prompt": 128, "answer": 128},
}
#: How far log p may be off: in bfloat16 the weights are rounded to 8 bits, which alone moves it by about 0.25.
CLOSE = {"float32": 1e-3, "bfloat16": 0.5}


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Asked:
    """An engine in another process."""

    def __init__(self, name: str, given: dict[str, Any], folder: Path) -> None:
        self.name, self.given, self.why = name, given, ""
        self.log = folder / f"{name.replace(' ', '-')}.log"
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            # Engines are built at the same time; some of them would write the same files.
            "VLLM_DISABLE_COMPILE_CACHE": "1",
        }
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with self.log.open("w", encoding="utf-8") as log:
            command = [sys.executable, str(Path(vllm_engine.__file__).resolve()), json.dumps(given)]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, limit: float) -> dict[str, Any] | None:
        """The next answer; None, and the reason in `why`, of an engine that failed or needed longer than `limit` seconds."""
        if self.why:
            return None
        try:
            line = self._lines.get(timeout=max(limit, 0.1))
        except queue.Empty:
            self.stop()
            self.why = f"no answer in {limit:.0f} s"
            return None
        if not line:
            self.process.wait()
            lines = [text for text in self.log.read_text(encoding="utf-8").splitlines() if text.strip()]
            errors = [text for text in lines if "Error" in text] or lines
            self.why = (errors[-1] if errors else "it ended without a word")[-300:]
            return None
        return json.loads(line)  # type: ignore[no-any-return]

    def ask(self, limit: float, do: str, **given: Any) -> dict[str, Any] | None:
        """Does one thing in the engine."""
        if not self.why:
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
                self.process.stdin.flush()
            except OSError:
                pass  # It ended; the answer says why.
        return self.answer(limit)

    def stop(self) -> None:
        """Ends the process, and those that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Reference:
    """The small model by transformers, in float64."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "small", attn_implementation="eager")
        self._model = model.double().eval()

    def compare(self, answer: dict[str, Any], own: dict[str, Any], close: float) -> dict[str, Any]:
        """What is said at the top of this file of one engine's answers; `own` are those of vLLM's attention."""
        off = regret = 0.0
        same = total = 0
        for prompt, tokens, likely, others in zip(
            answer["prompts"], answer["tokens"], answer["likely"], own["tokens"], strict=True
        ):
            with self._torch.no_grad():
                logits = self._model(self._torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            right = logits.double().log_softmax(-1)
            for row, token, told in zip(right, tokens, likely, strict=True):
                off = max(off, abs(float(row[token]) - told[str(token)]))
                regret = max(regret, float(row.max() - row[token]))
            differ = [one != other for one, other in zip(tokens, others, strict=True)]
            same += differ.index(True) if True in differ else len(tokens)
            total += len(tokens)
        cached_same = own["cached"] == answer["cached"]
        fine = off <= close and regret <= 2 * close and cached_same and max(own["cached"]) > 0
        found = {"off": off, "regret": regret, "same": same / total, "cached_same": cached_same}
        return {**found, "ok": fine, "backends": answer["backends"], "ops": answer["ops"]}


class Bench:
    """The engines, and what they answered."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.ends = time.monotonic() + options.seconds
        self.running: list[Asked] = []
        self.result: dict[str, Any] = {"answers": {}, "rows": [], "failures": {}, "built_s": {}}

    def left(self, at_most: float = 600.0) -> float:
        """Seconds until the end."""
        return min(at_most, float(self.ends - time.monotonic()))

    def small(self, by: str, mode: str, dtype: str) -> Asked:
        """An engine of the small model."""
        sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 32}
        arguments = {"model": str(self.folder / "small"), "dtype": dtype, **sizes}
        arguments |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
        given = {"by": by, "mode": mode, "sizes": [1, 2, 4, 8], "arguments": arguments}
        return self.start(f"{by} {mode} {dtype}", given)

    def large(self, by: str, mode: str, suffix: str = "") -> Asked:
        """An engine of the model whose speed is measured."""
        batched = 256 if self.options.tiny else 8192
        arguments: dict[str, Any] = {"model": str(self.folder / "large")}
        arguments |= {"dtype": "float32" if self.options.tiny else "bfloat16"}
        arguments |= {"load_format": "dummy", "max_model_len": 2048, "max_num_batched_tokens": batched}
        arguments |= {"max_num_seqs": 64, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 6 << 30}
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return self.start(f"{by} {mode}{suffix}", {"by": by, "mode": mode, "sizes": sizes, "arguments": arguments})

    def start(self, name: str, given: dict[str, Any]) -> Asked:
        """A new process."""
        one = Asked(name, given, self.folder)
        self.running.append(one)
        return one

    def built(self, engines: list[Asked], limit: float = 240.0) -> list[Asked]:
        """Those of the engines that were built."""
        for one in engines:
            answer = one.answer(self.left(limit))
            if answer is None:
                self.failed(one)
            else:
                self.result["built_s"][one.name] = answer["built_s"]
                say(f"{one.name}: built in {answer['built_s']} s")
        return [one for one in engines if not one.why]

    def failed(self, one: Asked) -> None:
        """Notes why an engine has no answers."""
        self.result["failures"][one.name] = one.why
        say(f"{one.name}: {one.why}")

    def answers(self, engines: list[Asked]) -> None:
        """Compares the small engines, and ends them."""
        if not engines:
            return
        reference = Reference(self.folder)
        for dtype in CLOSE:
            group = [one for one in engines if one.given["arguments"]["dtype"] == dtype]
            own = None
            for one in group:
                answer = one.ask(self.left(90.0), "answers")
                one.stop()
                if answer is None:
                    self.failed(one)
                    continue
                if one.given["by"] == OWN:
                    own = answer
                if own is not None:
                    self.result["answers"][one.name] = reference.compare(answer, own, CLOSE[dtype])
        self.write()

    def speed(self, engines: list[Asked]) -> None:
        """Times the rows, the engines in turns."""
        for name in self.options.rows if engines else ():
            row = self.sizes(name)
            seconds: dict[str, list[float]] = {one.name: [] for one in engines}
            for seed in range(self.options.rounds + 1):
                for one in engines if seed % 2 else reversed(engines):
                    if one.why or self.left() < 5:
                        continue
                    answer = one.ask(self.left(60.0), "timed", row=row, seed=1 + seed)
                    if answer is None:
                        self.failed(one)
                    elif seed:
                        # The first round, in which kernels are compiled, does not count.
                        seconds[one.name].append(answer["seconds"])
            answered = row["batch"] * row["answer"]
            speeds = {by: answered / statistics.median(each) for by, each in seconds.items() if each}
            self.result["rows"].append({"row": name, **row, "tokens_per_s": speeds, "seconds": seconds})
            self.write()

    def profiles(self, engines: list[Asked]) -> None:
        """What a step of the last row costs, in every engine."""
        row = self.sizes(self.options.rows[-1])
        for one in engines:
            if one.why or self.left() < 10:
                continue
            answer = one.ask(self.left(60.0), "profile", row=row, seed=100)
            if answer is None:
                self.failed(one)
            else:
                self.result.setdefault("steps", {})[one.name] = answer
                self.write()

    def sizes(self, name: str) -> dict[str, int]:
        """The requests of a row."""
        return {key: -(-size // 16) for key, size in ROWS[name].items()} if self.options.tiny else ROWS[name]

    def run(self) -> None:
        """All of it."""
        modes = ["eager"] if self.options.tiny else list(MODES)
        small: list[Asked] = []
        if not self.options.no_answers:
            ways = [(OWN, "eager")] + [(OURS, mode) for mode in modes]
            small = [self.small(by, mode, dtype) for dtype in CLOSE for by, mode in ways]
        timed = [mode for mode in modes if mode in self.options.modes]
        first = [] if self.options.no_speed else [self.large(by, mode) for mode in timed for by in (OWN, OURS)]
        self.answers(self.built(small))
        ready = self.built(first)
        self.speed(ready)
        if self.options.profile:
            self.profiles(ready)
        ours = [one for one in ready if one.given["by"] == OURS and not one.why]
        if (
            self.options.tune_seconds
            and not self.options.tiny
            and ours
            and self.left() > self.options.tune_seconds + 60
        ):
            for one in ours:
                each = self.options.tune_seconds / len(ours)
                say(f"{one.name}: tuned {one.ask(each + 60, 'tune', seconds=each)}")
                one.stop()
            again = self.built([self.large(OURS, mode, " tuned") for mode in timed])
            self.speed([one for one in ready if not one.why and one.given["by"] == OWN] + again)

    def write(self) -> None:
        """Writes what there is so far."""
        if self.options.json:
            Path(self.options.json).write_text(json.dumps(self.result, indent=1), encoding="utf-8")

    def end(self) -> None:
        """Ends all processes that this one started."""
        for one in self.running:
            one.stop()


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = []
    if result["answers"]:
        lines += ["| answers | off | regret | same tokens | cache | |", "|---|---:|---:|---:|---|---|"]
        for name, one in result["answers"].items():
            cache = "same" if one["cached_same"] else "DIFFERENT"
            numbers = f"{one['off']:.1e} | {one['regret']:.1e} | {one['same']:.1%} | {cache}"
            lines.append(
                f"| {name} | {numbers} | {'ok' if one['ok'] else 'off by more than ' + str(CLOSE[name.rpartition(' ')[2]])} |"
            )
        lines.append("")
    if result["rows"]:
        ways = list(dict.fromkeys(by for row in result["rows"] for by in row["tokens_per_s"]))
        lines += ["| tokens/s | " + " | ".join(ways) + " |", "|---|" + "---:|" * len(ways)]
        for row in result["rows"]:
            speeds, seconds = row["tokens_per_s"], row["seconds"]
            cells = []
            for by in ways:
                own = by.replace(OURS, OWN).removesuffix(" tuned")
                ratio = ""
                if by != own and {by, own} <= set(speeds):
                    best = min(seconds[own]) / min(seconds[by])
                    ratio = f" ({speeds[by] / speeds[own]:.2f}×, best {best:.2f}×)"
                cells.append(f"{speeds[by]:,.0f}{ratio}" if by in speeds else "")
            lines.append(f"| {row['row']} | " + " | ".join(cells) + " |")
    for name, steps in result.get("steps", {}).items():
        for kind, one in steps.items():
            lines += ["", f"{name}, one step of {kind}: {one['wall_ms']:.2f} ms on the wall, "]
            lines[-1] += f"{one['device_ms']:.2f} ms in {one['kernels']:.0f} kernels"
            lines += [f"    {top['us']:9.1f} µs {top['count']:7.2f}×  {top['name']}" for top in one["top"]]
    lines += [f"- {name}: {why}" for name, why in result["failures"].items()]
    return "\n".join(lines)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="how many of the 32 layers the timed model has")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each row")
    parser.add_argument("--seconds", type=float, default=280.0, help="end after this time, with what there is")
    parser.add_argument(
        "--tune-seconds", type=float, default=40.0, help="how long kernels are measured; 0 for not at all"
    )
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=list(MODES), help="what is timed")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        metavar="TEXT",
        help=f"rows whose name has this text: {', '.join(ROWS)}",
    )
    parser.add_argument("--profile", action="store_true", help="what a step of the last row costs, by kernel")
    parser.add_argument("--no-answers", action="store_true", help="only the speed")
    parser.add_argument("--no-speed", action="store_true", help="only the answers")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, without graphs, to test the script")
    parser.add_argument("--logs", help="a folder for the engines' logs")
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args(given)
    chosen = [name for name in ROWS if any(text in name for text in options.rows)]
    if not chosen:
        parser.error(f"no row has {' or '.join(options.rows)} in its name; there are: {'; '.join(ROWS)}")
    options.rows = chosen
    return options


def main() -> int:
    """Runs what the command line says; 1 if answers are wrong or an engine failed."""
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.logs or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, layers=options.layers, tiny=options.tiny)
        bench = Bench(options, folder)
        try:
            bench.run()
        finally:
            bench.end()
            bench.write()
        print(table(bench.result), flush=True)
    answers = bench.result["answers"].items()
    # What vLLM's own kernels are off by is theirs.
    wrong = [name for name, one in answers if name.startswith(OURS) and not one["ok"]]
    return 1 if wrong or bench.result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
