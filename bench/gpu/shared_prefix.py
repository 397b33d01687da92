"""Attention of requests that begin alike: LayerZero's kernels and FlashAttention 3 of vLLM, in microseconds on the device.

    python bench/gpu/shared_prefix.py --json shared_prefix.json

Every row is a call over a paged cache (pages of 16 tokens, 32 heads, 8 key/value heads of 128, bfloat16): one new token per
request, or a chunk of a prompt after a prefix that is in the cache. Calls over several caches, so that none finds the one before
in the second-level cache, are captured in a CUDA graph; the time is that of a replay over its calls, the median of the rounds.

    own     what the requests have of their own: their tokens without the common prefix, in megabytes of keys and values
    all     the same with the prefix counted once for every request
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
#: Columns of the block tables at least, as vLLM's for a model of 2048 tokens.
WIDTH = 128
#: Queries of a request that are compared with float64.
COMPARED = 128
CACHES = 4
#: Blocks of Triton's kernel for prompts over pages: rows, keys, warps, stages. The first is its own choice.
CUTS = ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 4))


class Batch(NamedTuple):
    """The requests of a row."""

    name: str
    requests: int
    prefix: int
    #: Tokens after the prefix, from and to.
    rest: tuple[int, int]
    #: New tokens of each; 1 for decoding.
    new: int


ROWS = (
    Batch("decode, 64 requests, a common prefix of 1024", 64, 1024, (128, 256), 1),
    Batch("decode, 64 requests, nothing common", 64, 0, (1152, 1280), 1),
    Batch("decode, 64 requests, nothing common, short", 64, 0, (512, 640), 1),
    Batch("decode, 256 requests, a common prefix of 1024", 256, 1024, (128, 256), 1),
    Batch("decode, 256 requests, nothing common", 256, 0, (1152, 1280), 1),
    Batch("decode, 32 requests, a common prefix of 1024", 32, 1024, (128, 256), 1),
    Batch("decode, 32 requests, nothing common", 32, 0, (1152, 1280), 1),
    Batch("decode, 16 requests, a common prefix of 1024", 16, 1024, (128, 256), 1),
    Batch("chunks of 128 after a common prefix of 1024, 56 requests", 56, 1024, (128, 128), 128),
    Batch("chunks of 512, nothing before, 16 requests", 16, 0, (512, 512), 512),
    Batch("a prompt of 8192, nothing before", 1, 0, (8192, 8192), 8192),
    Batch("chunks of 512 after 7680 tokens each, 4 requests", 4, 0, (8192, 8192), 512),
)
Calls = dict[str, Callable[[int], Any]]


class Made:
    """The tensors of a row, for several caches."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        generator = torch.Generator().manual_seed(0)
        count, shared = batch.requests, batch.prefix // PAGE
        low, high = batch.rest
        self.rests = torch.randint(low, high + 1, (count,), generator=generator)
        lens = batch.prefix + self.rests
        own = int(-(-int(lens.max()) // PAGE)) - shared
        pages = torch.randperm(shared + count * own, generator=generator)
        table = torch.zeros(count, max(WIDTH, shared + own), dtype=torch.int32)
        table[:, :shared] = pages[:shared]
        table[:, shared : shared + own] = pages[shared:].view(count, own)
        self.tables, self.lens = table.cuda(), lens.int().cuda()
        self.starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * batch.new
        self.longest = int(lens.max())
        # As vLLM has them: keys and values of a head side by side.
        shape = (len(pages), PAGE, KV_HEADS, 2 * DIM)
        self.caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(CACHES)]
        self.query = torch.randn(count * batch.new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def parts(self, at: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a cache."""
        cache = self.caches[at]
        return cache[..., :DIM], cache[..., DIM:]

    def megabytes(self) -> tuple[float, float]:
        """Keys and values of the requests' own tokens, and of all tokens of each."""
        own, token = int(self.rests.sum()), KV_HEADS * 2 * DIM * 2
        return own * token / 1e6, (own + self.batch.requests * self.batch.prefix) * token / 1e6


def ours(made: Made) -> Calls:
    """The kernels of LayerZero that can serve a row."""
    from layerzero.backends._shared.torch_device_functions.paged import prefill_flash
    from layerzero.backends.triton import prefilling
    from layerzero.backends.triton.decoding import paged, together

    calls: Calls = {}
    if made.batch.new > 1:
        for cut in CUTS:
            calls[f"LayerZero, blocks of {cut}"] = chunks(made, prefilling, cut)
        calls["LayerZero, torch's FlashAttention 2 over gathered pages"] = lambda at: prefill_flash(
            made.query, *made.parts(at), made.tables, made.lens, made.starts, None, True, None, -1, "NHD"
        )
        return calls

    def by(kernel: Any) -> Callable[[int], Any]:
        plans = [
            kernel.direct(made.query, *made.parts(at), made.tables, made.lens, None, -1, 0.0, "NHD")
            for at in range(CACHES)
        ]
        return lambda at: plans[at][0](*plans[at][1])

    calls["LayerZero, as it chooses"] = by(paged.decode)
    usual = together.together_for
    together.together_for = lambda *_: 1  # type: ignore[assignment]
    try:
        calls["LayerZero, each request by itself"] = by(paged.decode)
    finally:
        together.together_for = usual
    return calls


def chunks(made: Made, prefilling: Any, cut: tuple[int, int, int, int]) -> Callable[[int], Any]:
    """Triton's kernel for prompts over pages, with its work cut into blocks of such rows, keys, warps and stages."""
    usual = prefilling.blocks_for
    prefilling.blocks_for = lambda *_: prefilling.Blocks(*cut)
    try:
        plans = [
            prefilling.prefill.direct(
                made.query, *made.parts(at), made.tables, made.lens, made.starts, True, None, -1, 0.0, "NHD"
            )
            for at in range(CACHES)
        ]
    finally:
        prefilling.blocks_for = usual
    return lambda at: plans[at][0](*plans[at][1])


def flash(made: Made) -> Calls:
    """FlashAttention 3 as vLLM calls it; nothing where vLLM is not installed."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError:
        return {}
    # vLLM's own: a bound for steps that it captures in full graphs, which are those of few tokens.
    splits = 32 if made.batch.new == 1 else 0
    plan = get_scheduler_metadata(
        batch_size=made.batch.requests,
        max_seqlen_q=made.batch.new,
        max_seqlen_k=made.longest,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=DIM,
        cache_seqlens=made.lens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=made.starts,
        page_size=PAGE,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )
    output = torch.empty_like(made.query)

    def call(at: int) -> Tensor:
        keys, values = made.parts(at)
        flash_attn_varlen_func(
            q=made.query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=made.starts,
            max_seqlen_q=made.batch.new,
            seqused_k=made.lens,
            max_seqlen_k=made.longest,
            softmax_scale=DIM**-0.5,
            causal=True,
            window_size=[-1, -1],
            block_table=made.tables,
            softcap=0.0,
            scheduler_metadata=plan,
            fa_version=3,
            num_splits=splits,
        )
        return output

    return {"FlashAttention 3": call}


def microseconds(call: Callable[[int], Any], rounds: int) -> float:
    """Of one call, on the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for at in range(CACHES):
            call(at)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for at in range(2 * CACHES):
            call(at % CACHES)
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000.0 * begin.elapsed_time(end) / (2 * CACHES))
    return statistics.median(times[3:])


def compared(made: Made) -> Tensor:
    """The rows that are compared with float64: the last queries of the first requests."""
    new = made.batch.new
    last = torch.arange(max(new - COMPARED, 0), new)
    return torch.cat([request * new + last for request in range(min(made.batch.requests, 3))]).cuda()


def expected(made: Made) -> Tensor:
    """What these rows are, in float64 over gathered keys."""
    keys, values = made.parts(0)
    rows = []
    for row in compared(made).split(min(made.batch.new, COMPARED)):
        request = int(row[0]) // made.batch.new
        length = int(made.lens[request])
        pages = made.tables[request, : -(-length // PAGE)].long()
        key, value = (
            part[pages].flatten(0, 1)[:length].double().repeat_interleave(HEADS // KV_HEADS, 1)
            for part in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", made.query[row].double(), key) * DIM**-0.5
        later = torch.ones(len(row), length, dtype=torch.bool, device="cuda").triu(length - len(row) + 1)
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), value))
    return torch.cat(rows)


def main() -> int:
    """Times the rows; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed replays of each call")
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args()
    results, wrong = [], 0
    for batch in ROWS:
        made = Made(batch)
        own, everything = made.megabytes()
        rows, wanted = compared(made), expected(made)
        found: dict[str, Any] = {"row": batch.name, "own_mb": own, "all_mb": everything, "us": {}, "off": {}}
        for name, call in {**ours(made), **flash(made)}.items():
            try:
                got = call(0)[rows].double()
                found["off"][name] = float((got - wanted).abs().max())
                found["us"][name] = microseconds(call, options.rounds)
            except Exception as error:  # noqa: BLE001 - the other calls are timed all the same
                found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            wrong += found["off"][name] > 2e-2
        results.append(found)
        print(f"{batch.name} (own {own:.0f} MB, all {everything:.0f} MB)")
        for name, us in found["us"].items():
            print(f"    {us:8.1f} µs  {everything / us:6.2f} TB/s of all  off by {found['off'][name]:.1e}  {name}")
        for name, why in found.get("failed", {}).items():
            print(f"    {name}: {why}")
        sys.stdout.flush()
        del made
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
