"""``layerzero bench tokenize``: ``lz.tokenize`` beside the libraries called directly.

A byte-level BPE tokenizer is trained on this package's own sources. One short text and 64 long ones are tokenized by
LayerZero, by the library the tokenizer belongs to, and by the library LayerZero chose, in interleaved rounds; then with a
cache in which every text is found, and one in which none is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero.backends.tiktoken.adapter import cpus
from layerzero.bench.rounds import difference, interleaved
from layerzero.tokenization.remembering import REMEMBERED
from layerzero.tokenization.resolving import resolve

SHORT = "The quick brown fox jumps over the lazy dog, and nobody knows why."
LONG_TEXTS, LONG_LENGTH = 64, 4000


def sources() -> str:
    """English and Python to train on and to tokenize."""
    files = sorted(Path(lz.__file__).parent.rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def train(text: str, size: int) -> Any:
    """A tokenizer as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _rows(native: Any, texts: Any, rounds: int, count: int) -> dict[str, Any]:
    encoding = resolve("bench").libraries["tiktoken"].encoding
    several = isinstance(texts, list)
    # Texts nobody has seen: a cache is only in their way.
    fresh = itertools.count()

    def unseen() -> Any:
        return [f"{next(fresh)} {text}" for text in texts] if several else f"{next(fresh)} {texts}"

    calls: dict[str, Callable[[], Any]] = {
        "lz": lambda: lz.tokenize(texts, "bench"),
        "tokenizers": (lambda: [e.ids for e in native.encode_batch(texts)])
        if several
        else (lambda: native.encode(texts).ids),
        "tiktoken": (lambda: encoding.encode_ordinary_batch(texts))
        if several
        else (lambda: encoding.encode_ordinary(texts)),
        "tiktoken, one thread": (lambda: [encoding.encode_ordinary(text) for text in texts])
        if several
        else (lambda: encoding.encode_ordinary(texts)),
        "lz, unseen": lambda: lz.tokenize(unseen(), "bench"),
        "making unseen texts": unseen,
    }
    times = interleaved(calls, rounds=rounds, count=count)
    lz.configure(tokenizer={"cache_mb": 64})
    try:
        cached = interleaved(
            {"hit": lambda: lz.tokenize(texts, "bench"), "miss": lambda: lz.tokenize(unseen(), "bench")},
            rounds=rounds,
            count=count,
        )
    finally:
        lz.configure(tokenizer=None)
        REMEMBERED.clear()
    median = {name: statistics.median(found) for name, found in {**times, **cached}.items()}
    direct = min(("tokenizers", "tiktoken", "tiktoken, one thread"), key=median.__getitem__)
    return {
        "kernel_id": lz.which("tokenize", texts, "bench").kernel_id,
        "texts": len(texts) if several else 1,
        "characters": sum(map(len, texts)) if several else len(texts),
        "lz_us": median["lz"],
        "direct_us": {name: median[name] for name in ("tokenizers", "tiktoken", "tiktoken, one thread")},
        "fastest_directly": direct,
        "times_own_library": statistics.median(b / a for a, b in zip(times["lz"], times["tokenizers"], strict=True)),
        "overhead_us": difference(times, "lz", direct),
        "over_fastest": statistics.median(a / b for a, b in zip(times["lz"], times[direct], strict=True)),
        "cache": {
            "hit_us": median["hit"],
            "miss_us": median["miss"] - median["making unseen texts"],
            "without_us": median["lz, unseen"] - median["making unseen texts"],
        },
        "rounds": rounds,
        "calls_per_round": count,
    }


def measure(rounds: int = 21, vocabulary: int = 8000) -> dict[str, Any]:
    """Everything, as data. Times are microseconds per call, medians over interleaved rounds."""
    import time
    from importlib.metadata import version

    text = sources()
    native = train(text, vocabulary)
    begun = time.perf_counter()
    lz.register_tokenizer("bench", native)
    registered = time.perf_counter() - begun
    long = [text[i * LONG_LENGTH : (i + 1) * LONG_LENGTH] for i in range(LONG_TEXTS)]
    for texts in (SHORT, long):
        wanted = [e.ids for e in native.encode_batch(texts)] if isinstance(texts, list) else native.encode(texts).ids
        if lz.tokenize(texts, "bench")["input_ids"] != wanted:
            raise AssertionError("the ids are not those of the tokenizer's own library")
    return {
        "schema_version": "1.0",
        "versions": {name: version(name) for name in ("tokenizers", "tiktoken")}
        | {"layerzero": lz.__version__, "python": platform.python_version()},
        "cpus": cpus(),
        "vocabulary": native.get_vocab_size(),
        "registered_s": registered,
        "short": _rows(native, SHORT, rounds, 200),
        "long": _rows(native, long, rounds, 1),
    }


def _print(result: dict[str, Any]) -> None:
    print(f"tokenizing, µs per call (medians of interleaved rounds), {result['cpus']} CPUs")
    for name, title in (("short", "one short text"), ("long", f"{LONG_TEXTS} long texts")):
        row = result[name]
        direct = ", ".join(f"{library} {us:.1f}" for library, us in row["direct_us"].items())
        print(f"{title}: {row['characters']} characters, by {row['kernel_id']}")
        print(f"  through lz {row['lz_us']:.1f}; directly: {direct}")
        print(f"  {row['times_own_library']:.2f} times as fast as the tokenizer's own library, ", end="")
        print(f"{row['over_fastest']:.2f} of the fastest, overhead {row['overhead_us']:.2f}")
        cache = row["cache"]
        print(f"  cache: hit {cache['hit_us']:.1f}, miss {cache['miss_us']:.1f}, without {cache['without_us']:.1f}")
    print(f"a vocabulary of {result['vocabulary']} was loaded and proven in {result['registered_s']:.2f} s")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench tokenize", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds (21)")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens of the tokenizer that is trained (8000)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.vocabulary < 300:
        parser.error("at least 1 round, and 300 tokens")
    result = measure(options.rounds, options.vocabulary)
    print(json.dumps(result, indent=2)) if options.json else _print(result)
    return 0
