"""Eight threads call LayerZero as fast as they can; every result is checked, and nothing may grow.

    python bench/soak.py --seconds 10

Prints one JSON object and fails when a call failed, a result was wrong, selection was degraded, or the rate or the memory
is out of bounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import layerzero as lz
import torch
import torch.nn.functional as F

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.int64: 0.0}


@dataclass(frozen=True)
class Call:
    """One call, and what the first run of it gave; that one was compared with torch."""

    name: str
    run: Callable[[], torch.Tensor]
    baseline: torch.Tensor

    def is_right(self, result: torch.Tensor) -> bool:
        """Bit for bit, or within tolerance where another kernel was chosen."""
        return torch.equal(result, self.baseline) or is_close(result, self.baseline)


@dataclass(frozen=True)
class Report:
    """What a soak found."""

    threads: int
    calls: int
    errors: int
    wrong: int
    seconds: float
    calls_per_second: float
    rss_growth_bytes: int
    objects_growth: int
    blocks_growth: int
    first_error: str | None
    level: str


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within the tolerance of the dtype."""
    tolerance = TOLERANCE[b.dtype]
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def prepared() -> list[Call]:
    """Operations, dtypes and shapes mixed as a decoder mixes them, each checked against torch once."""
    torch.manual_seed(0)
    calls: list[Call] = []

    def add(name: str, ours: Callable[[], Any], theirs: torch.Tensor) -> None:
        baseline = ours()
        if not is_close(baseline, theirs.to(baseline.dtype)):
            raise AssertionError(f"{name} differs from torch before the soak began")
        calls.append(Call(name, ours, baseline))

    for dtype in (torch.float32, torch.bfloat16):
        for rows, width in ((1, 64), (4, 128), (16, 64)):
            x, y, w = (
                torch.randn(rows, width).to(dtype),
                torch.randn(rows, width).to(dtype),
                torch.randn(width).to(dtype),
            )
            m = (torch.randn(32, width) / width**0.5).to(dtype)
            wide = (x.double(), y.double(), w.double(), m.double())
            tag = f"{dtype} {rows}x{width}"
            add(f"rms_norm {tag}", partial(lz.rms_norm, x, w), F.rms_norm(wide[0], (width,), wide[2], 1e-6))
            add(f"silu_mul {tag}", partial(lz.silu_mul, x, y), F.silu(wide[0]) * wide[1])
            add(f"gelu {tag}", partial(lz.gelu, x), F.gelu(wide[0]))
            add(f"linear {tag}", partial(lz.linear, x, m), wide[0] @ wide[3].T)
            add(
                f"layer_norm {tag}",
                partial(lz.layer_norm, x, None, w),
                F.layer_norm(wide[0], (width,), wide[2]),
            )
        for seq_q, seq_k, heads, kv_heads in ((1, 7, 4, 4), (1, 16, 4, 2), (5, 5, 2, 1)):
            q = torch.randn(1, heads, seq_q, 16).to(dtype)
            k, v = torch.randn(2, 1, kv_heads, seq_k, 16).to(dtype)
            mask = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q)
            theirs = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)
            add(
                f"attention {dtype} {seq_q}x{seq_k} {heads}/{kv_heads}",
                partial(lz.attention, q, k, v, layout="BHSD"),
                theirs,
            )
    table, ids = torch.randn(50, 16), torch.randint(0, 50, (3, 5))
    add("embedding", lambda: lz.embedding(ids, table), table[ids])
    logits, uniform = torch.randn(4, 50), torch.zeros(4)
    add("sample_topk", lambda: lz.sample_topk(logits, 5, uniform=uniform), logits.argmax(-1))
    return calls


def resident() -> int:
    """Bytes of this process in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Soak:
    """The threads and what they found."""

    def __init__(self, calls: list[Call], threads: int) -> None:
        self.calls = calls
        self.threads = threads
        self.done = [0] * threads
        self.errors = [0] * threads
        self.wrong = [0] * threads
        self.first_error: str | None = None
        self.stop = threading.Event()

    def _work(self, thread: int, most: int | None) -> None:
        order = self.calls[thread % len(self.calls) :] + self.calls[: thread % len(self.calls)]
        done = 0
        while not self.stop.is_set() and (most is None or done < most):
            call = order[done % len(order)]
            done += 1
            try:
                if not call.is_right(call.run()):
                    self.wrong[thread] += 1
                    self.first_error = self.first_error or f"{call.name} gave something else"
            except Exception as error:  # noqa: BLE001 (whatever goes wrong is counted)
                self.errors[thread] += 1
                self.first_error = self.first_error or f"{call.name}: {error!r}"
        self.done[thread] = done

    def round(self, *, seconds: float | None = None, most: int | None = None) -> float:
        """All threads, for some seconds or some calls each; the seconds it took."""
        workers = [threading.Thread(target=self._work, args=(i, most)) for i in range(self.threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        if seconds is not None:
            self.stop.wait(seconds)
            self.stop.set()
        for worker in workers:
            worker.join()
        self.stop.clear()
        return time.perf_counter() - start


def soak(threads: int = 8, *, seconds: float | None = None, most: int | None = None, warm: int = 250) -> Report:
    """Warms up, then measures; growth is from the end of the warm-up to the end."""
    run = Soak(prepared(), threads)
    run.round(most=warm)
    gc.collect()
    before = (resident(), len(gc.get_objects()), sys.getallocatedblocks())
    took = run.round(seconds=seconds, most=most)
    gc.collect()
    after = (resident(), len(gc.get_objects()), sys.getallocatedblocks())
    calls = sum(run.done)
    return Report(
        threads=threads,
        calls=calls,
        errors=sum(run.errors),
        wrong=sum(run.wrong),
        seconds=round(took, 3),
        calls_per_second=round(calls / took, 1),
        rss_growth_bytes=after[0] - before[0],
        objects_growth=after[1] - before[1],
        blocks_growth=after[2] - before[2],
        first_error=run.first_error,
        level=lz.health().level,
    )


def main() -> int:
    """The soak of the specification: eight threads, ten seconds, ten thousand calls a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10_000.0, help="least calls per second")
    parser.add_argument("--growth", type=int, default=32 << 20, help="most bytes of resident memory gained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = soak(options.threads, seconds=options.seconds)
    print(json.dumps(asdict(report)))
    steady = report.rss_growth_bytes <= options.growth and report.calls_per_second >= options.rate
    well = report.errors == 0 and report.wrong == 0 and report.level == "full"
    return 0 if steady and well else 1


if __name__ == "__main__":
    sys.exit(main())
