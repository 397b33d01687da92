"""Steps of a model on a CPU: transformers as it is against `lz.optimize(model)`, with and without packed weights.

The model has the sizes of one of Llama's, with fewer layers and random weights. A step is one forward: a prompt, or one token after a
context. All variants are the same model; what is done to it is undone before the next. Times are medians of rounds in turn.

    python bench/models_cpu.py --json > models-cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import torch

#: Hidden size, size inside the MLP, heads, key/value heads, size of the vocabulary.
SIZES = {"llama-3.2-1b": (2048, 8192, 32, 8, 128_256), "smollm2-135m": (576, 1536, 9, 3, 49_152)}
#: Tokens of a step, and tokens before it.
STEPS = {
    "decode after 128": (1, 128),
    "decode after 1024": (1, 1024),
    "prompt of 16": (16, 0),
    "prompt of 128": (128, 0),
}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "sdpa": None,
    "optimize": {},
    "pack_weights": {"pack_weights": True},
    "int8 weights": {"pack_weights": "int8"},
    "int4 weights": {"pack_weights": "int4"},
}


def built(name: str, layers: int, dtype: torch.dtype) -> Any:
    """A model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads, kv_heads, vocabulary = SIZES[name]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


@contextlib.contextmanager
def as_variant(model: Any, options: dict[str, Any] | None) -> Iterator[None]:
    """The model as a variant."""
    if options is None:
        yield
        return
    with lz.optimize(model, **options):
        yield


def step(model: Any, tokens: int, before: int) -> Callable[[], torch.Tensor]:
    """One step, which can be repeated."""
    from transformers import DynamicCache

    ids = torch.randint(model.config.vocab_size, (1, before + tokens))
    cache = DynamicCache(config=model.config)
    if before:
        model(ids[:, :before], past_key_values=cache, use_cache=True)

    def run() -> torch.Tensor:
        given = {"past_key_values": cache, "use_cache": True} if before else {"use_cache": False}
        logits: torch.Tensor = model(ids[:, before:], **given).logits
        if before:
            cache.crop(-tokens)
        return logits

    return run


@torch.no_grad()
def measure(name: str, layers: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Every step in every variant, in turn."""
    model = built(name, layers, dtype)
    runs = {label: step(model, *sizes) for label, sizes in STEPS.items()}
    times: dict[str, dict[str, list[float]]] = {label: {v: [] for v in VARIANTS} for label in STEPS}
    logits: dict[str, dict[str, torch.Tensor]] = {label: {} for label in STEPS}
    for _ in range(rounds):
        for variant, options in VARIANTS.items():
            with as_variant(model, options):
                for label, run in runs.items():
                    logits[label][variant] = run()
                    begin = time.perf_counter()
                    run()
                    times[label][variant].append(time.perf_counter() - begin)
    rows = []
    for label in STEPS:
        plain = logits[label]["sdpa"].float()
        row: dict[str, Any] = {"model": name, "dtype": str(dtype).removeprefix("torch."), "step": label}
        for variant in VARIANTS:
            row[f"{variant}_ms"] = statistics.median(times[label][variant]) * 1e3
            ratios = [a / b for a, b in zip(times[label]["sdpa"], times[label][variant], strict=True)]
            row[f"{variant}_speedup"] = statistics.median(ratios)
            off = (logits[label][variant].float() - plain).abs().max() / plain.abs().max()
            row[f"{variant}_off"] = float(off)
        rows.append(row)
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the models (4)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in turn (9)")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), help="which models")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="which dtypes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [
        row
        for name in options.models
        for dtype in options.dtypes
        for row in measure(name, options.layers, getattr(torch, dtype), options.rounds)
    ]
    if options.json:
        versions = {"layerzero": lz.__version__, "torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"versions": versions, "threads": torch.get_num_threads(), "rows": rows}, indent=2))
        return
    print(f"{'':<44}" + "".join(f"{variant:>22}" for variant in VARIANTS))
    for row in rows:
        cells = "".join(f"{row[f'{v}_ms']:>13.1f} ({row[f'{v}_speedup']:.2f}x)" for v in VARIANTS)
        print(f"{row['model']} {row['dtype']} {row['step']:<20}".ljust(44) + cells)


if __name__ == "__main__":
    main()
