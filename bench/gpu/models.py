"""A Llama of transformers, by who serves its parts: tokens per second of prefill and decode.

    python bench/gpu/models.py --json models.json

Llama-3-8B's geometry, random weights, bfloat16. The variants are the same model, of the same weights:

    eager      transformers' own attention, written out
    sdpa       transformers with torch's attention
    layerzero  attn_implementation="layerzero", the rest as it is
    optimize   lz.optimize(model): attention, norms, rotary embedding, MLP
    graphs     lz.optimize(model, fuse_qkv=True, cuda_graphs=True)

and each of them but the last compiled by ``torch.compile``. Decoding is over a cache that grows; ``graphs`` and the
compiled variants have one of fixed size, as ``generate()`` gives them. Compiled steps of it run by ``--mode``. Every step is timed from an idle device, and the median is given. The
variants of a step are warmed one after the other and then take turns, so that what disturbs the machine meets all of
them. Compiled variants come last, one by one, within ``--compile-seconds``. What fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import layerzero as lz
import torch

Step = Callable[[], torch.Tensor]

VARIANTS = ("eager", "sdpa", "layerzero", "optimize", "graphs")
PREFILL = (512, 4096, 16384)
DECODE = (1, 16, 128)
CONTEXT = 1024


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def build(device: str, layers: int, tiny: bool) -> Any:
    """The model, with attention by torch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "num_hidden_layers": layers,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    if tiny:
        sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"vocab_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


@contextmanager
def served(model: Any, variant: str) -> Iterator[None]:
    """The model, its parts served by a variant; afterwards by torch again."""
    if variant == "optimize":
        with lz.patched(model):
            yield
        return
    model.set_attn_implementation(variant)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def prefill(call: Any, tokens: torch.Tensor) -> Step:
    """A step over a whole prompt, giving the logits of its last position."""
    return lambda: call(input_ids=tokens, use_cache=False, logits_to_keep=1).logits


def decode(call: Any, model: Any, tokens: torch.Tensor) -> Step:
    """A step of one token per sequence after a context, which is the same at every step."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    config, batch = model.config, tokens.shape[0]
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device=tokens.device).manual_seed(1)
    shape = (batch, heads, tokens.shape[1], width)
    for index in range(config.num_hidden_layers):
        # What a context's keys and values are does not change how long a step takes.
        two = [torch.randn(shape, generator=generator, device=tokens.device, dtype=model.dtype) for _ in range(2)]
        cache.update(*two, index)
    held = [(layer.keys, layer.values) for layer in cache.layers]
    token = tokens[:, :1].clone()

    def step() -> torch.Tensor:
        for layer, (keys, values) in zip(cache.layers, held, strict=True):
            layer.keys, layer.values = keys, values
        return call(input_ids=token, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]

    return step


def fixed_decode(call: Any, model: Any, tokens: torch.Tensor, room: int = 256) -> Step:
    """The same over a cache of fixed size with room for more tokens. Every step writes the same slot."""
    from transformers import StaticCache

    batch, length = tokens.shape
    cache = StaticCache(config=model.config, max_cache_len=length + room)
    config = model.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    generator = torch.Generator(device=tokens.device).manual_seed(1)
    for layer in cache.layers:
        two = [
            torch.randn((batch, heads, length, width), generator=generator, device=tokens.device, dtype=model.dtype)
            for _ in range(2)
        ]
        layer.update(*two)
    token, at = tokens[:, :1].clone(), torch.full((batch, 1), length, device=tokens.device)
    allowed = (torch.arange(length + room, device=tokens.device) <= length).expand(batch, 1, 1, -1).contiguous()
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> torch.Tensor:
        for held in lengths:
            held.fill_(length)
        return call(  # type: ignore[no-any-return]
            input_ids=token, attention_mask=allowed, position_ids=at, past_key_values=cache, use_cache=True
        ).logits

    return step


class Clock:
    """Milliseconds of a step that begins on an idle device, the host's share included."""

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"

    def ms(self, step: Step) -> float:
        self._wait()
        begun = time.perf_counter()
        step()
        self._wait()
        return (time.perf_counter() - begun) * 1e3

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class Run:
    """All variants and steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device: str = options.device
        self._clock = Clock(self._device)
        self._model = build(self._device, options.layers, options.tiny)
        self.rows: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}
        self.report: dict[str, Any] = {}
        self._right: dict[str, torch.Tensor] = {}
        self._compiling_left: float = options.compile_seconds

    def steps(self) -> list[tuple[str, int, int]]:
        """(kind, batch, tokens of the prompt or the context)."""
        scale = 64 if self._options.tiny else 1
        prompts = [("prefill", 1, length // scale) for length in PREFILL]
        steps = prompts + [("decode", batch, CONTEXT // scale) for batch in DECODE]
        return [step for step in steps if step[0] in self._options.kinds]

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Every step by every variant, first as it is, then compiled."""
        say(f"{sum(p.numel() for p in self._model.parameters()) / 1e9:.2f} billion weights on {self._device}")
        if "layerzero" in self._options.variants or "optimize" in self._options.variants:
            lz.register_with_transformers()
        if self._options.tune_seconds:
            self._tune()
        with lz.patched(self._model) as done:
            self.report = done.report.to_dict()
            say(str(done.report))
        for kind, batch, length in self.steps():
            self.rows.append({"kind": kind, "batch": batch, "tokens": length, "ms": {}})
        for row in self.rows:
            self._take_turns(row)
            self._say_row(row)
        # Compiling may take long, so it comes last, within its time.
        for row in reversed(self.rows) if self._options.compile_seconds > 0 else ():
            for variant in self._turning():
                self._measure_compiled(row, variant)
            self._say_row(row)
        return self.result()

    @staticmethod
    def _named(row: dict[str, Any]) -> str:
        return f"{row['kind']} batch {row['batch']} tokens {row['tokens']}"

    def _say_row(self, row: dict[str, Any]) -> None:
        say(f"{self._named(row)}: {', '.join(f'{name} {ms:.2f} ms' for name, ms in row['ms'].items())}")
        self._write()

    def _take_turns(self, row: dict[str, Any]) -> None:
        """All variants of a step as they are: one after the other until each is warm, then in turns."""
        times: dict[str, list[float]] = {}
        # The model is changed in place, so that the step is the same for all of them.
        step = self._step(self._model, row)
        for variant in self._turning():
            where = f"{variant}, {self._named(row)}"
            if variant == "eager" and row["kind"] == "prefill" and row["tokens"] > 8192 and not self._options.all:
                # Of 16k tokens and 32 heads: 17 GB as bfloat16, 34 GB as float32.
                self.failures[where] = "left out: the scores of its softmax are 50 GB (--all)"
                continue
            with self._named_if_it_fails(where):
                self._agree(where, row, self._warm(variant, step))
                times[variant] = []
        for _ in range(self._options.rounds):
            for variant, seen in times.items():
                with self._named_if_it_fails(f"{variant}, {self._named(row)}"), served(self._model, variant):
                    step()
                    seen.append(self._clock.ms(step))
        row["ms"] |= {variant: statistics.median(seen) for variant, seen in times.items() if seen}
        if "graphs" in self._options.variants:
            self._measure_graphs(row)

    def _turning(self) -> list[str]:
        """The variants that take turns: graphs would be captured anew in every turn."""
        return [variant for variant in self._options.variants if variant != "graphs"]

    def _measure_graphs(self, row: dict[str, Any]) -> None:
        """The step as a CUDA graph, by itself."""
        where = f"graphs, {self._named(row)}"
        with (
            self._named_if_it_fails(where),
            lz.patched(self._model, fuse_qkv=True, cuda_graphs=True) as optimized,
        ):
            step = self._step(self._model, row, fixed=True)
            self._agree(where, row, self._repeated(step))
            row["ms"]["graphs"] = statistics.median(self._clock.ms(step) for _ in range(self._options.rounds))
            say(f"  {where}: {optimized.graphs}")

    def _measure_compiled(self, row: dict[str, Any], variant: str) -> None:
        """One variant of one step, compiled."""
        name = f"{variant} compiled"
        where = f"{name}, {self._named(row)}"
        if self._compiling_left <= 0:
            self.failures[where] = f"left out: {self._options.compile_seconds:.0f} s of compiling are used up"
            return
        begun = time.perf_counter()
        with self._named_if_it_fails(where), served(self._model, variant):
            torch._dynamo.reset()
            # As `generate()` compiles it.
            compiled = torch.compile(self._model, dynamic=False, mode=self._options.mode)
            step = self._step(compiled, row, fixed=True)
            self._agree(where, row, self._warm(variant, step))
            row["ms"][name] = statistics.median(self._clock.ms(step) for _ in range(self._options.rounds))
        took = time.perf_counter() - begun
        self._compiling_left -= took
        say(f"  {where}: {self.failures.get(where, f'{took:.1f} s')}")

    @contextmanager
    def _named_if_it_fails(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other variants go on
            self.failures[where] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
        finally:
            gc.collect()
            if self._device != "cpu":
                torch.cuda.empty_cache()

    def _step(self, call: Any, row: dict[str, Any], fixed: bool = False) -> Step:
        tokens = self._tokens(row["batch"], row["tokens"])
        if row["kind"] == "prefill":
            return prefill(call, tokens)
        return (fixed_decode if fixed else decode)(call, self._model, tokens)

    def _warm(self, variant: str, step: Step) -> torch.Tensor:
        """Runs a step by a variant until it is warm. Its logits."""
        with served(self._model, variant):
            return self._repeated(step)

    def _repeated(self, step: Step) -> torch.Tensor:
        """Runs a step until it is warm: kernels of LayerZero are compiled in the background while torch's serve. Its logits."""
        begun, calls = time.perf_counter(), 0
        while calls < 4 or time.perf_counter() - begun < self._options.warm_seconds:
            logits, calls = step(), calls + 1
        return logits.float().clone()

    def _tokens(self, batch: int, length: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(batch * 100003 + length)
        vocabulary = self._model.config.vocab_size
        return torch.randint(0, vocabulary, (batch, length), generator=generator, device=self._device)

    def _agree(self, where: str, row: dict[str, Any], logits: torch.Tensor) -> None:
        """Whether the logits are those of the step's first variant, up to the rounding of bfloat16."""
        right = self._right.setdefault(self._named(row), logits.cpu())
        apart = float((logits.cpu() - right).abs().max() / right.abs().max())
        if apart > 0.1:
            self.failures[f"{where}, agreement"] = f"logits are {apart:.2f} of the largest one apart from the first's"

    def _tune(self) -> None:
        """Measures the kernels for the calls that the steps make."""
        with lz.patched(self._model):
            for kind, batch, length in self.steps():
                self._step(self._model, {"kind": kind, "batch": batch, "tokens": length})()
        begun = time.perf_counter()
        device = "cpu" if self._device == "cpu" else "cuda"
        seen = [entry for entry in lz.manifest() if str(entry["device"]).startswith(device)]
        calls = [json.loads(e["call"]) if isinstance(e["call"], str) else e["call"] for e in seen]
        for index, call in enumerate(calls):
            share = (self._options.tune_seconds - (time.perf_counter() - begun)) / (len(calls) - index)
            try:
                lz.tune(calls=[call], device=self._device, budget=max(share, 0.2), progress=False)
            except Exception as error:  # noqa: BLE001 - the other calls are tuned all the same
                self.failures[f"tune {call['op']}"] = f"{type(error).__name__}: {error}"[:200]
        say(f"tuned {len(calls)} kinds of calls in {time.perf_counter() - begun:.0f} s")

    def result(self) -> dict[str, Any]:
        """Everything, as data."""
        import transformers

        gpu = torch.cuda.get_device_name() if self._device != "cpu" else "none"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "layerzero": lz.__version__}
        environment = {"gpu": gpu, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), **versions}
        environment |= {"layers": self._model.config.num_hidden_layers, "rounds": self._options.rounds}
        environment |= {"tuned": bool(self._options.tune_seconds)}
        return {
            "environment": environment,
            "rows": self.rows,
            "optimized": self.report,
            "failures": self.failures,
        }

    def _write(self) -> None:
        if self._options.json:
            Path(self._options.json).write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """Tokens per second, and how many times those of sdpa, as Markdown."""
    rows = result["rows"]
    names = [name for v in VARIANTS for name in (v, f"{v} compiled") if any(name in row["ms"] for row in rows)]
    lines = [f"| step | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in rows:
        done = row["batch"] * row["tokens"] if row["kind"] == "prefill" else row["batch"]
        what = f"{row['tokens']} tokens" if row["kind"] == "prefill" else f"batch {row['batch']}"
        cells = []
        for name in names:
            ms = row["ms"].get(name)
            if ms is None:
                cells.append("–")
                continue
            plain = row["ms"].get("sdpa compiled" if name.endswith("compiled") else "sdpa")
            times = "" if plain is None or name.startswith("sdpa") else f" ({plain / ms:.2f}×)"
            cells.append(f"{done / ms * 1e3:,.0f}{times}")
        lines.append(f"| {row['kind']}, {what} | {' | '.join(cells)} |")
    lines.append("")
    lines.append("Tokens per second; in brackets: times `sdpa`, as it is or compiled.")
    lines += [f"- {name}: {why}" for name, why in result["failures"].items()]
    return "\n".join(lines)


def options(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32, help="how many of the 32 layers to build")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--kinds", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode"])
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each")
    parser.add_argument("--compile-seconds", type=float, default=900.0, help="time for torch.compile; 0 leaves it out")
    parser.add_argument("--mode", default="reduce-overhead", help="how torch.compile compiles")
    parser.add_argument(
        "--warm-seconds", type=float, default=3.0, help="how long each step is repeated before it is timed"
    )
    parser.add_argument("--tune-seconds", type=float, default=0.0, help="measure kernels for these calls first")
    parser.add_argument("--all", action="store_true", help="also eager attention of 16k tokens")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts, to test the script")
    parser.add_argument("--json", help="a file for the result as data")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Runs and prints one table."""
    run = Run(options(given))
    result = run.run()
    run._write()
    print(table(result))


if __name__ == "__main__":
    main()
