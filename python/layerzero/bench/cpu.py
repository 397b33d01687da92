"""``layerzero bench cpu``: LayerZero on a CPU against the torch code a user would write, call by call.

Each row is one call at sizes of real models: ``lz`` as LayerZero serves it, ``torch`` the literal code, timed in turn in one
process with one number of threads. ``kernel_id`` is the kernel that was chosen, ``spread`` are the quartiles of the speed-up over
the rounds. ``floor_us`` is the time the row's bytes take at the bandwidth of a copy that no cache holds: a kernel that reads its
tensors from memory cannot take less, but one whose tensors stay in a cache can. ``off`` is the largest difference of both results,
of the largest number of torch's; none of calls that draw random numbers. With ``--peers``, MKL, oneDNN and OpenVINO take turns with
both where they have the operation (``cpu_peers``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import layerzero as lz
from layerzero.bench import cpu_peers
from layerzero.bench.rounds import interleaved

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
#: Microseconds that the calls of a round may take.
ROUND_US = 4_000
#: A call below so many microseconds is small.
SMALL_US = 50.0
#: Rows and width of norms, and of activations.
NORMS = ((1, 2048), (16, 768), (512, 4096))
#: Rows and width of softmax: attention weights of one query and of a prompt, and logits.
SOFTMAXES = ((1, 4096), (12 * 128, 128), (12 * 512, 512), (1, 50_257))
ACTIVATIONS = ((1, 3072), (64, 3072), (512, 4096))
#: Rows, in and out of linear layers.
LINEARS = ((1, 768, 768), (1, 768, 3072), (1, 4096, 4096), (2, 4096, 4096), (4, 768, 3072), (16, 768, 768))
#: The same of products that are made with a packed weight and with a plain one.
PRODUCTS = ((1, 768, 768), (16, 768, 768), (128, 768, 768), (128, 768, 3072), (512, 3072, 768))
#: In and out of linear layers with weights of integers, against torch's product with the weight as floats, and against making
#: floats of them for every call.
QUANTIZED = ((768, 768), (4096, 4096), (4096, 14_336))
#: Batch, query heads, key/value heads, cached tokens, width of a head.
DECODES = (
    (1, 12, 12, 128, 64),
    (1, 12, 12, 1024, 64),
    (1, 32, 8, 4096, 64),
    (1, 32, 8, 1024, 128),
    (4, 32, 8, 512, 128),
)
#: Tokens of a page.
PAGE = 16
#: Batch, heads, tokens and width of a head, of attention of many queries.
PREFILLS = ((1, 12, 128, 64), (1, 12, 512, 64), (8, 12, 128, 64), (1, 32, 2048, 64))
#: Tokens of vocabularies that are sampled from: GPT-2's and Llama 3's.
VOCABULARIES = (50_257, 128_256)


class Case:
    """A call of a public function, and the torch code for it."""

    def __init__(self, kind: str, shape: str, moved: int, torch: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        self.kind, self.shape, self.moved, self.torch = kind, shape, moved, torch
        self.args, self.options = args, kwargs
        self.function = name = kind.partition(",")[0]
        self.lz: Callable[[], Any] = partial(getattr(lz, name), *args, **kwargs)
        self.which: Callable[[], Any] = partial(lz.which, name, *args, **kwargs)


def _size(*tensors: Tensor) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _norms(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    for rows, hidden in NORMS:
        x, w, b = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype), torch.randn(hidden).to(dtype)
        shape, plain = f"{rows}x{hidden}", partial(F.rms_norm, x, (hidden,), w, 1e-6)
        yield Case("rms_norm", shape, _size(x, x, w), plain, x, w, 1e-6)
        plain = partial(F.layer_norm, x, (hidden,), w, b, 1e-5)
        yield Case("layer_norm", shape, _size(x, x, w, b), plain, x, (hidden,), w, b, 1e-5)


def _activations(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    for rows, width in ACTIVATIONS:
        x, up = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
        shape = f"{rows}x{width}"
        for form in ("none", "tanh"):
            yield Case(f"gelu, {form}", shape, _size(x, x), partial(F.gelu, x, approximate=form), x, form)
        yield Case("silu_mul", shape, _size(x, x, up), partial(silu_mul, x, up), x, up)
    for rows, width in SOFTMAXES:
        x = torch.randn(rows, width).to(dtype)
        yield Case("softmax", f"{rows}x{width}", _size(x, x), partial(torch.softmax, x, -1), x)


def _products(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    for rows, ins, outs in dict.fromkeys((*LINEARS, *PRODUCTS)):
        x, w, b = torch.randn(rows, ins).to(dtype), torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype)
        shape, plain = f"{rows}x{outs}x{ins}", partial(F.linear, x, w, b)
        moved = _size(x, w, b) + rows * outs * dtype.itemsize
        yield Case("linear", shape, moved, plain, x, w, b)
        if (rows, ins, outs) in PRODUCTS:
            yield Case("linear, packed", shape, moved, plain, x, lz.pack(w), b)


def _integers(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    from layerzero.backends._shared.packed_weights import dequantized

    def both(x: Tensor, integers: Tensor, scales: Tensor) -> Tensor:
        return F.linear(x, (integers * scales).flatten(1))

    for ins, outs in QUANTIZED:
        weight = torch.randn(outs, ins) / ins**0.5
        for kind, group in (("int8", None), ("int8", 128), ("int4", 64)):
            packed = lz.pack(weight, dtype=kind, group=group)
            name = kind if group is None else f"{kind} in groups of {group}"
            rounded, scales = packed.unpack().to(dtype), packed.scales
            assert scales is not None
            units = dequantized(packed.blocks, torch.ones_like(scales), outs, ins, packed.group)
            integers = units.to(torch.int8).view(outs, scales.shape[1], -1)
            scales = scales.transpose(1, 2).flatten(0, 1)[:outs, :, None].to(dtype)
            for rows in (1, 4, 16, 128):
                x = torch.randn(rows, ins).to(dtype)
                shape, moved = f"{rows}x{outs}x{ins}", _size(x) + packed.nbytes + rows * outs * dtype.itemsize
                yield Case(f"linear_quantized, {name}", shape, moved, partial(F.linear, x, rounded), x, packed)
                if rows in (1, 16):
                    kind_of = f"linear_quantized, {name}, dequantized"
                    yield Case(kind_of, shape, moved, partial(both, x, integers, scales), x, packed)


def _tables(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    def dequantize(values: Tensor, scales: Tensor) -> Tensor:
        return (values.float() * scales).to(dtype)

    for rows, hidden in ((1, 768), (64, 768), (64, 4096)):
        table, ids = torch.randn(8192, hidden).to(dtype), torch.randint(8192, (rows,))
        moved = 2 * rows * hidden * dtype.itemsize
        yield Case("embedding", f"{rows}x{hidden}", moved, partial(F.embedding, ids, table), ids, table)
    how = {"dtype": str(dtype).removeprefix("torch."), "granularity": "per_channel"}
    for rows in (1, 64):
        for kind in ("int8", "fp8_e4m3"):
            values, scales, _ = lz.quantize(torch.randn(rows, 4096), kind, granularity="per_channel")
            moved = _size(values, scales) + values.numel() * dtype.itemsize
            plain = partial(dequantize, values, scales)
            yield Case(f"dequantize, {kind}", f"{rows}x4096", moved, plain, values, scales, **how)


def _decode(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return torch.softmax(50.0 * torch.tanh(scores / 50.0), -1) @ v

    def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, grouped: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, -window:], v[:, :, -window:], enable_gqa=grouped)

    def paged(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, grouped: bool) -> Tensor:
        k, v = (cache[tables].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=grouped)[:, :, 0]

    for batch, heads, kv_heads, tokens, width in DECODES:
        shape, grouped = f"{batch}x{heads}/{kv_heads}x{tokens}x{width}", heads != kv_heads
        q = torch.randn(batch, heads, 1, width).to(dtype)
        k, v = (torch.randn(batch, kv_heads, tokens, width).to(dtype) for _ in range(2))
        moved, how = _size(q, q, k, v), {"causal": True, "layout": "BHSD"}
        plain = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=grouped)
        yield Case("attention, decode", shape, moved, plain, q, k, v, **how)
        window = tokens // 4
        plain = partial(windowed, q, k, v, window, grouped)
        yield Case("attention, window", shape, moved // 4, plain, q, k, v, **how, window=(window - 1, 0))
        yield Case("attention, softcap", shape, moved, partial(capped, q, k, v), q, k, v, **how, softcap=50.0)
        pages = tokens // PAGE
        keys, values = (torch.randn(batch * pages, PAGE, kv_heads, width).to(dtype) for _ in range(2))
        tables = torch.randperm(batch * pages).view(batch, pages).to(torch.int32)
        lens, q = torch.full((batch,), tokens, dtype=torch.int32), q[:, :, 0].contiguous()
        plain = partial(paged, q, keys, values, tables, grouped)
        yield Case("paged_attention", shape, moved, plain, q, keys, values, tables, lens, layout="NHD")


def _prefill(dtype: Any) -> Iterator[Case]:
    import torch
    import torch.nn.functional as F

    def capped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return torch.softmax(50.0 * torch.tanh(scores / 50.0) + bias, -1) @ v

    for batch, heads, tokens, width in PREFILLS:
        shape = f"{batch}x{heads}x{tokens}x{width}"
        q, k, v = (torch.randn(batch, heads, tokens, width).to(dtype) for _ in range(3))
        moved, how = _size(q, q, k, v), {"causal": True, "layout": "BHSD"}
        plain = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield Case("attention, prefill", shape, moved, plain, q, k, v, **how)
        plain = partial(F.scaled_dot_product_attention, q, k, v)
        yield Case("attention, full", shape, moved, plain, q, k, v, causal=False, layout="BHSD")
        ahead = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
        window = tokens // 4
        mask = (ahead <= 0) & (ahead > -window)
        plain = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)
        yield Case("attention, prefill window", shape, moved, plain, q, k, v, **how, window=(window - 1, 0))
        if tokens <= 512:
            bias = torch.zeros(tokens, tokens).masked_fill(ahead > 0, -math.inf).to(dtype)
            plain = partial(capped, q, k, v, bias)
            yield Case("attention, prefill softcap", shape, moved, plain, q, k, v, **how, softcap=50.0)


def _sampling(dtype: Any) -> Iterator[Case]:
    import torch

    def topk(logits: Tensor, k: int) -> Tensor:
        values, ids = torch.topk(logits, k)
        return ids.gather(-1, torch.multinomial(values.float().softmax(-1), 1))[:, 0]

    def topp(logits: Tensor, p: float) -> Tensor:
        values, ids = logits.float().softmax(-1).sort(-1, descending=True)
        kept = values.masked_fill(values.cumsum(-1) - values >= p, 0.0)
        return ids.gather(-1, torch.multinomial(kept, 1))[:, 0]

    for vocabulary in VOCABULARIES:
        # As a model's: a few tokens have most of the probability; and flat, where thousands have to be kept.
        for name, spread in (("", 4.0), (" flat", 1.0)):
            logits = torch.randn(1, vocabulary).mul(spread).to(dtype)
            shape, moved = f"1x{vocabulary}", _size(logits)
            yield Case(f"sample_topp,{name} 0.9", shape, moved, partial(topp, logits, 0.9), logits, 0.9)
        yield Case("sample_topk, 50", shape, moved, partial(topk, logits, 50), logits, 50)
        yield Case("sample_topk, 1", shape, moved, partial(torch.argmax, logits, -1), logits, 1)


GROUPS = (_norms, _activations, _tables, _products, _integers, _decode, _prefill, _sampling)


def cases(kinds: set[str] | None = None) -> Iterator[tuple[str, Case]]:
    """Every case with its dtype; those of some functions where they are named."""
    import torch

    for name in DTYPES:
        for group in GROUPS:
            for case in group(getattr(torch, name)):
                if kinds is None or case.function in kinds:
                    yield name, case


def _bandwidth(clock: Callable[[], float]) -> float:
    """Bytes per microsecond that a copy of 64 MiB reads and writes."""
    import torch

    source, target = torch.ones(16 << 20), torch.empty(16 << 20)
    best = math.inf
    for _ in range(5):
        begin = clock()
        target.copy_(source)
        best = min(best, clock() - begin)
    return 2 * _size(source) / best / 1e6


def _cpu() -> str:
    """What the system calls the CPU."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _off(result: Tensor, right: Tensor) -> float:
    """The largest difference, of the largest number."""
    result = result.to_dense() if result.is_mkldnn else result
    right = right.double()
    return float((result.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))


def _row(
    dtype: str, case: Case, rounds: int, bandwidth: float, clock: Callable[[], float], peers: list[str]
) -> dict[str, Any]:
    others = cpu_peers.calls(peers, case.function, case.args, case.options)
    calls = {"lz": case.lz, "torch": case.torch, **others}
    right = case.torch()
    off = {name: _off(call(), right) for name, call in calls.items() if not case.kind.startswith("sample_")}
    once = min(interleaved(calls, rounds=3, count=3, clock=clock)["torch"])
    times = interleaved(calls, rounds=rounds, count=max(int(ROUND_US / max(once, 1.0)), 1), clock=clock)
    ratios = sorted(t / z for t, z in zip(times["torch"], times["lz"], strict=True))
    return {
        "kind": case.kind,
        "dtype": dtype,
        "shape": case.shape,
        "kernel_id": case.which().kernel_id,
        **{f"{name}_us": statistics.median(times[name]) for name in ("lz", "torch")},
        "speedup": statistics.median(ratios),
        "speedup_fastest": min(times["torch"]) / min(times["lz"]),
        "spread": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "floor_us": case.moved / bandwidth,
        "off": off.get("lz"),
        "peers": {
            name: {
                "us": statistics.median(times[name]),
                "speedup": statistics.median(t / z for t, z in zip(times[name], times["lz"], strict=True)),
                "off": off[name],
            }
            for name in others
        },
    }


def _mean(speedups: list[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, speedups))) if speedups else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows say together."""
    speedups = [row["speedup"] for row in rows]
    small = [row["speedup"] for row in rows if row["torch_us"] < SMALL_US]
    half = [row["speedup"] for row in rows if row["dtype"] != "float32"]
    return {
        "rows": len(rows),
        "geomean": _mean(speedups),
        "geomean_small": _mean(small),
        "geomean_half": _mean(half),
        "at_least_torch": statistics.fmean(s >= 1.0 for s in speedups) if rows else None,
        "native": statistics.fmean(row["kernel_id"].startswith("lz_cpu.") for row in rows) if rows else None,
        "peers": {name: _against(rows, name) for name in cpu_peers.PEERS if any(name in row["peers"] for row in rows)},
    }


def _against(rows: list[dict[str, Any]], peer: str) -> dict[str, Any]:
    """The rows that a peer has too."""
    speedups = [row["peers"][peer]["speedup"] for row in rows if peer in row["peers"]]
    return {"rows": len(speedups), "geomean": _mean(speedups), "at_least": statistics.fmean(s >= 1.0 for s in speedups)}


def measure(
    rounds: int = 15,
    kinds: set[str] | None = None,
    thread_time: bool = False,
    prefer: str | None = None,
    peers: list[str] | None = None,
) -> dict[str, Any]:
    """Every row, as data. Times are microseconds per call, medians over interleaved rounds.

    ``prefer`` names a backend whose kernels serve where they can, whatever is known of their speed. ``peers`` take turns with LayerZero
    and torch: names of :data:`layerzero.bench.cpu_peers.PEERS`.

    With ``thread_time``, the time is the CPU time of the thread, which must be the only one: what other programs take of a busy
    machine is left out.
    """
    import torch

    if thread_time and torch.get_num_threads() != 1:
        raise ValueError("thread time is that of one thread; set OMP_NUM_THREADS=1")
    clock = time.thread_time if thread_time else time.perf_counter
    bandwidth = _bandwidth(clock)
    with torch.no_grad(), lz.prefer(prefer) if prefer else contextlib.nullcontext():
        table = [_row(dtype, case, rounds, bandwidth, clock, peers or []) for dtype, case in cases(kinds)]
    return {
        "schema_version": "1.0",
        "versions": {"layerzero": lz.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "cpu": {"name": _cpu(), "isa": torch.backends.cpu.get_cpu_capability()},
        "threads": torch.get_num_threads(),
        "clock": "thread" if thread_time else "wall",
        "rounds": rounds,
        "prefer": prefer,
        "copy_gb_per_s": bandwidth / 1e3,
        "summary": summary(table),
        "rows": table,
    }


def _print(result: dict[str, Any]) -> None:
    cpu = result["cpu"]
    print(f"µs (median of {result['rounds']} rounds, {result['threads']} threads, {cpu['name']} {cpu['isa']})")
    print(f"  {'':<48}{'lz':>10}{'torch':>10}{'speed-up':>10}{'floor':>9}  kernel")
    for row in result["rows"]:
        name = f"{row['kind']} {row['dtype']} {row['shape']}"
        times = f"{row['lz_us']:>10.2f}{row['torch_us']:>10.2f}{row['speedup']:>10.2f}{row['floor_us']:>9.2f}"
        peers = "".join(f", {peer} {found['us']:.2f}" for peer, found in row["peers"].items())
        print(f"  {name:<48}{times}  {row['kernel_id']}{peers}")
    for name, value in (*result["summary"].pop("peers").items(), *result["summary"].items()):
        if isinstance(value, dict):
            value = f"{value['geomean']:.3g} in {value['rows']} rows, at least as fast in {value['at_least']:.0%}"
            print(f"  over {name}: {value}")
            continue
        print(f"  {name}: {value if isinstance(value, int) or value is None else format(value, '.3g')}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench cpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (15)")
    parser.add_argument(
        "--functions", type=lambda text: set(text.split(",")), help="only these: layer_norm,attention,…"
    )
    parser.add_argument("--thread-time", action="store_true", help="CPU time of the one thread, on a busy machine")
    parser.add_argument("--prefer", metavar="BACKEND", help="serve by this backend's kernels where they can: lz_cpu")
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"also time {','.join(cpu_peers.PEERS)}, or some of them",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("rounds is at least 1")
    unknown = [name for name in options.peers or [] if name not in cpu_peers.PEERS]
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}; there are {', '.join(cpu_peers.PEERS)}")
    try:
        result = measure(options.rounds, options.functions, options.thread_time, options.prefer, options.peers)
    except ValueError as wrong:
        parser.error(str(wrong))
    print(json.dumps(result, indent=2)) if options.json else _print(result)
    return 0
