"""The limits of a GPU: memory that is full or only held, batches beyond a launch, and what looking at memory costs.

```console
$ PYTHONPATH=python python bench/gpu/limits.py --out limits.json       # about a minute on an H200
```

(a) torch's cache holds 95% of the device: a kernel with a workspace is still chosen. The device is full: it is not, and the
call is right. (b) A batch of 70,000: right, with one warning at most. (c) Free memory is not looked at on the thread that
makes calls, and a call costs the host what it cost before a look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import layerzero as lz
import torch
from layerzero import _native
from torch import Tensor

GIB = 1 << 30
BATCH = 70_000
ROUNDS, CALLS = 41, 200
Row = dict[str, Any]


def paged_inputs(batch: int, heads: int, kv_heads: int, tokens: int) -> tuple[Tensor, ...]:
    """Queries, caches of pages of 16 tokens, their tables and lengths; sequences share pages where there are many."""
    block, dim = 16, 128
    each = -(-tokens // block)
    pages = min(batch * each, 4096)
    draw = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device="cuda", generator=draw)
    caches = [
        torch.randn(pages, block, kv_heads, dim, dtype=torch.bfloat16, device="cuda", generator=draw) for _ in range(2)
    ]
    tables = torch.randint(0, pages, (batch, each), dtype=torch.int32, device="cuda", generator=draw)
    lens = torch.randint(1, tokens + 1, (batch,), dtype=torch.int32, device="cuda", generator=draw)
    return query, *caches, tables, lens


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query of (heads, dim) over (tokens, kv heads, dim), in float64."""
    q, k, v = (tensor.double() for tensor in (query, keys, values))
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = torch.einsum("hd,thd->ht", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)


def paged_error(output: Tensor, inputs: tuple[Tensor, ...], rows: list[int]) -> float:
    """The largest difference from float64 among some sequences."""
    query, keys, values, tables, lens = inputs
    worst = 0.0
    for row in rows:
        pages, length = tables[row].long(), int(lens[row])
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (keys, values))
        worst = max(worst, float((output[row].double() - attend(query[row], k, v)).abs().max()))
    return worst


def sample(count: int) -> list[int]:
    """Some rows: the first, the last, those at both sides of 65,535, and others in between."""
    around = [0, 1, count // 2, 65_534, 65_535, 65_536, count - 2, count - 1]
    return sorted({row for row in [*around, *range(0, count, max(count // 16, 1))] if 0 <= row < count})


def chosen(inputs: tuple[Tensor, ...]) -> tuple[str, int, int | None]:
    """The kernel for a paged decode, its workspace, and what is available."""
    explained = lz.explain("paged_attention", *inputs)
    kernel = str(explained.chosen)
    workspace = next((c.workspace_bytes for c in explained.candidates if c.kernel_id == kernel), None)
    return kernel, workspace or 0, explained.available_bytes


def memory(rows: list[Row]) -> None:
    """(a) A kernel with a workspace under a cache that is full, and on a device that is."""
    wanted = "flashinfer" if find_spec("flashinfer") else "triton"
    with lz.prefer(wanted):
        _memory(rows, wanted)


def _memory(rows: list[Row], wanted: str) -> None:
    inputs = paged_inputs(batch=8, heads=32, kv_heads=8, tokens=4096)
    # A kernel that is compiled on first use is compiled beside the calls, and chosen when that is done.
    end = time.perf_counter() + 40
    while time.perf_counter() < end:
        lz.paged_attention(*inputs)
        if chosen(inputs)[0].startswith(wanted):
            break
        time.sleep(0.5)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    # One block, given back to torch's cache: the driver has 5% left, and torch 90% unused.
    held = torch.empty(max(free - total // 20, 1), dtype=torch.uint8, device="cuda")
    del held
    _native.refresh_memory()
    kernel, workspace, available = chosen(inputs)
    error = paged_error(lz.paged_attention(*inputs), inputs, list(range(8)))
    rows.append({
        "case": "cache holds 95%", "kernel": kernel, "workspace": workspace, "available": available, "error": error,
        "ok": kernel.startswith(wanted) and workspace > 0 and error < 0.03,
    })  # fmt: skip
    torch.cuda.empty_cache()
    # Full: what is left is less than the headroom of 1 GiB.
    free, _ = torch.cuda.mem_get_info()
    filled = torch.empty(max(free - GIB // 2, 1), dtype=torch.uint8, device="cuda")
    _native.refresh_memory()
    after, workspace, available = chosen(inputs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = paged_error(lz.paged_attention(*inputs), inputs, list(range(8)))
    rows.append({
        "case": "device is full", "kernel": after, "workspace": workspace, "available": available, "error": error,
        "warnings": len(said), "ok": after != kernel and error < 0.03,
    })  # fmt: skip
    del filled
    torch.cuda.empty_cache()
    _native.refresh_memory()


def measured(
    rows: list[Row], name: str, call: Callable[[], Tensor], error: Callable[[Tensor], float], most: float
) -> list[str]:
    """Makes a call, compares some of its rows with float64, and gives what it warned of."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        output = call()
        torch.cuda.synchronize()
    said = [str(warning.message) for warning in given]
    worst = error(output)
    ok = worst < most and len(said) <= 1
    rows.append({"case": name, "error": worst, "warnings": len(said), "said": said, "ok": ok})
    return said


def dense(rows: list[Row]) -> None:
    """(b) Attention of a batch beyond what y and z of a grid can have."""
    q, k, v = (torch.randn(BATCH, 8, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    at = torch.tensor(sample(BATCH), device="cuda")

    def error(output: Tensor) -> float:
        query, key, value = (t[at].transpose(1, 2).double() for t in (q, k, v))
        later = torch.ones(8, 8, dtype=torch.bool, device="cuda").triu(1)
        scores = (query @ key.transpose(-1, -2) / 8.0).masked_fill(later, float("-inf"))
        return float((output[at].transpose(1, 2).double() - scores.softmax(-1) @ value).abs().max())

    measured(rows, "attention, batch 70,000", lambda: lz.attention(q, k, v), error, 0.03)
    # A kernel that has the batch on y, alone: it has to be split.
    lz.force_kernel("attention.standard.prefill", "torch.cuda.sdpa.flash")
    said = measured(rows, "attention, flash alone", lambda: lz.attention(q, k, v), error, 0.03)
    lz.unforce_kernel("attention.standard.prefill")
    rows[-1]["ok"] = rows[-1]["ok"] and "split into 2 pieces" in " ".join(said)


def paged(rows: list[Row]) -> None:
    """(b) Paged decode of as many sequences."""
    inputs, some = paged_inputs(batch=BATCH, heads=32, kv_heads=8, tokens=64), sample(BATCH)
    call = lambda: lz.paged_attention(*inputs)
    measured(rows, "paged decode, batch 70,000", call, lambda output: paged_error(output, inputs, some), 0.03)


def norms(rows: list[Row]) -> None:
    """(b) Norms of the heads of as many sequences."""
    x = torch.randn(BATCH * 32, 128, dtype=torch.bfloat16, device="cuda")
    at = torch.tensor(sample(BATCH * 32), device="cuda")

    def error(output: Tensor) -> float:
        wide = x[at].double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return float((output[at].double() - expected).abs().max())

    measured(rows, "rms_norm, 70,000 x 32 rows", lambda: lz.rms_norm(x, eps=1e-6), error, 0.03)


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds the host spends on a call: the median of rounds."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begun) / CALLS * 1e6)
    return statistics.median(times)


def probes(rows: list[Row]) -> None:
    """(c) Who looks at memory, and what a call costs meanwhile."""
    threads: list[int] = []
    stats = torch.cuda.memory_stats

    def counted(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return stats(*arguments, **named)

    x = torch.randn(8, 4096, dtype=torch.bfloat16, device="cuda")
    inputs = paged_inputs(batch=8, heads=32, kv_heads=8, tokens=1024)
    calls: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: lz.rms_norm(x),
        "paged decode": lambda: lz.paged_attention(*inputs),
    }
    for call in calls.values():
        for _ in range(20):
            call()
    torch.cuda.memory_stats = counted  # type: ignore[assignment]
    try:
        before = {name: host_us(call) for name, call in calls.items()}
        # Looked at again and again beside the calls.
        going = threading.Event()
        looking = threading.Thread(target=lambda: [_native.refresh_memory() for _ in range(20) if not going.wait(0.05)])
        looking.start()
        during = {name: host_us(call) for name, call in calls.items()}
        going.set()
        looking.join()
        after = {name: host_us(call) for name, call in calls.items()}
    finally:
        torch.cuda.memory_stats = stats  # type: ignore[assignment]
    own = threads.count(threading.get_ident())
    for name in calls:
        ratio = after[name] / before[name]
        rows.append({
            "case": f"{name}: host time", "before_us": before[name], "during_us": during[name], "after_us": after[name],
            "ratio": ratio, "looks": len(threads), "looks_on_the_callers_thread": own,
            "ok": own == 0 and ratio < 1.25,
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="where the figures are written, as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    begun, rows = time.perf_counter(), list[Row]()
    for part in (memory, dense, paged, norms, probes):
        try:
            part(rows)
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen as well
            told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            rows.append({"case": part.__name__, "error": told, "ok": False})
        torch.cuda.empty_cache()
    took = time.perf_counter() - begun
    for row in rows:
        rest = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items() if k not in ("case", "ok", "said")}
        print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['case']:<28} {rest}")
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} as they should be, {took:.0f} s")
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": took, "rows": rows}
        with open(options.out, "w") as file:
            json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main()
