"""Times `triton.attention` with several blocks, against the torch code one writes: how `blocks_for` was chosen.

    $ python bench/gpu/attention_blocks.py              # about a minute
    $ python bench/gpu/attention_blocks.py gemma bert   # cases whose names begin so

A line for each: the case, queries × keys, warps, stages and span, µs, how many times as fast as torch, the largest
difference from torch's result. `*` marks what `blocks_for` takes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from layerzero.backends.triton import ahead
from layerzero.backends.triton.attention import Blocks, plan
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Call = dict[str, Any]
#: By head size: what is tried.
TRIED = {
    64: [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3)],
    128: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 32, 8, 4)],
    256: [(128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3)],
}
SPANS = (256, 0)


def attention(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> Call:
    """A call with tokens next to each other, as models have them; causal where it has no mask."""

    def operand(heads: int) -> Tensor:
        return torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    call = {"query": operand(heads), "key": operand(kv_heads), "value": operand(kv_heads), "attn_mask": None}
    call |= {"causal": "attn_mask" not in more, "scale": None, "window_left": -1, "window_right": -1}
    return call | {"softcap": 0.0, "layout": "BHSD"} | more


def padding(batch: int, length: int) -> Tensor:
    """Sequences of half the length and up: (batch, 1, 1, length)."""
    lengths = torch.linspace(length // 2, length, batch, device="cuda").long()
    return (torch.arange(length, device="cuda") < lengths[:, None])[:, None, None]


def causal(length: int, window: int = -1) -> Tensor:
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()
    return mask if window < 0 else mask.triu(-window)


def t5_bias() -> Tensor:
    return torch.randn(1, 12, 512, 512, device="cuda", dtype=torch.bfloat16)


CASES: dict[str, Callable[[], Call]] = {
    "gemma softcap": lambda: attention(1, 2048, 16, 8, 256, softcap=50.0),
    "bert padding": lambda: attention(16, 512, 12, 12, 64, attn_mask=padding(16, 512)),
    "t5 bias": lambda: attention(1, 512, 12, 12, 64, attn_mask=t5_bias()),
    "llama padded": lambda: attention(16, 2048, 32, 8, 128, attn_mask=padding(16, 2048).flip(-1) & causal(2048)),
    "llama causal": lambda: attention(1, 2048, 32, 8, 128),
    "mistral window": lambda: attention(1, 6144, 32, 8, 128, window_left=4096),
    "gpt-oss window": lambda: attention(1, 2048, 64, 8, 64, window_left=128),
}


def literal(call: Call) -> Callable[[], Tensor]:
    """What one writes in torch. Masks of windows and bounds are made once, as models do."""
    q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    softcap, group = call["softcap"], q.shape[1] // k.shape[1]
    if softcap:
        hidden = torch.zeros_like(causal(q.shape[2]), dtype=q.dtype).masked_fill_(~causal(q.shape[2]), -torch.inf)

        def capped() -> Tensor:
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = torch.matmul(q, keys.transpose(2, 3)) * q.shape[3] ** -0.5
            scores = torch.tanh(scores / softcap) * softcap + hidden
            return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), values)

        return capped
    if call["window_left"] >= 0:
        mask = causal(q.shape[2], call["window_left"])
    return partial(scaled_dot_product_attention, q, k, v, mask, is_causal=mask is None, enable_gqa=group > 1)


def microseconds(run: Callable[[], object]) -> float:
    """The median of five, each of enough calls for a millisecond."""
    times, calls = [], 0
    for attempt in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(max(calls, 3)):
            run()
        end.record()
        end.synchronize()
        took = 1e3 * begin.elapsed_time(end) / max(calls, 3)
        calls = min(int(2e3 / took) + 1, 50)
        times += [took] if attempt else []
    return sorted(times)[len(times) // 2]


def candidates(call: Call) -> Iterator[Blocks | None]:
    """Blocks to try: the usual ones first."""
    mask = call["attn_mask"]
    spans = SPANS if mask is not None and mask.dtype == torch.bool else SPANS[:1]
    yield None
    for cut, span in itertools.product(TRIED[call["query"].shape[3]], spans):
        yield Blocks(*cut, span)


def compiled(pool: ProcessPoolExecutor, call: Call, blocks: Blocks | None) -> Future[None]:
    """Has another process compile what a call needs, into Triton's cache."""
    function, tensors = plan(**call, blocks=blocks)
    return pool.submit(ahead.compile, ahead.launches(lambda: function(*tensors), 0))


def line(name: str, call: Call, blocks: Blocks | None, torch_us: float, want: Tensor) -> str:
    """What came of it."""
    function, tensors = plan(**call, blocks=blocks)
    shown = "*" if blocks is None else "{}x{} warps {} stages {} span {}".format(*blocks)
    try:
        off = (function(*tensors).float() - want.float()).abs().max().item()
        took = microseconds(lambda: function(*tensors))
    except Exception as error:  # noqa: BLE001
        return f"{name:16} {shown:36} {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return f"{name:16} {shown:36} {took:9.1f} µs {torch_us / took:6.2f}x  off by {off:.4f}"


def main() -> None:
    torch.manual_seed(0)
    chosen = {name: make for name, make in CASES.items() if name.startswith(tuple(sys.argv[1:] or [""]))}
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        waiting: list[Future[None]] = []
        for call in (make() for make in chosen.values()):
            waiting += [compiled(pool, call, blocks) for blocks in candidates(call)]
        for future in waiting:
            future.exception()
    for name, make in chosen.items():
        call = make()
        run = literal(call)
        want, torch_us = run(), microseconds(run)
        print(f"{name:16} {'torch':36} {torch_us:9.1f} µs", flush=True)
        for blocks in candidates(call):
            print(line(name, call, blocks, torch_us, want), flush=True)


if __name__ == "__main__":
    main()
