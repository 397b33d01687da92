"""Compiled models with torch's kernels among the candidates against the same without them, and eager torch.

``python bench/torch_kernels.py [--threads 1] [--seconds 0.5]``: in turns, in one process; the lower quartile of each, since what else
runs on the machine only makes calls slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import layerzero as lz
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: A module, or a function of tensors.
Model = Callable[..., Tensor]


def cases() -> list[tuple[str, Model, list[Tensor]]]:
    found: list[tuple[str, Model, list[Tensor]]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).partition(".")[2]
        for rows, outs, ins in ((16, 768, 768), (128, 768, 768), (512, 256, 256)):
            found.append((f"linear {rows}x{outs}x{ins} {name}", nn.Linear(ins, outs), [torch.randn(rows, ins)]))
        found.append((f"matmul 256x256x256 {name}", torch.matmul, [torch.randn(256, 256) for _ in range(2)]))
        found.append(
            (f"matmul 12x128x128x64 {name}", torch.matmul, [torch.randn(12, 128, 64), torch.randn(12, 64, 128)])
        )
        found.append(
            (
                f"attention 1x12x128x64 {name}",
                F.scaled_dot_product_attention,
                [torch.randn(1, 12, 128, 64) for _ in range(3)],
            )
        )
        found.append((f"conv 64x56x56, 3x3 {name}", nn.Conv2d(64, 64, 3, padding=1), [torch.randn(1, 64, 56, 56)]))
        for at in range(len(found) - 7, len(found)):
            label, model, inputs = found[at]
            model = model.to(dtype).eval() if isinstance(model, nn.Module) else model
            found[at] = (label, model, [x.to(dtype) for x in inputs])
    return found


def contest(functions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The lower quartile of each in seconds, in rounds that begin with another one each time."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    end, turn = time.perf_counter() + seconds * len(functions), 0
    while turn < 5 or time.perf_counter() < end:
        for i in range(len(functions)):
            at = (i + turn) % len(functions)
            start = time.perf_counter()
            functions[at]()
            times[at].append(time.perf_counter() - start)
        turn += 1
    return [sorted(own)[len(own) // 4] for own in times]


def compiled(model: Model, inputs: list[Tensor], deny: bool) -> Callable[[], object]:
    lz.configure(rules=[{"deny": "torch"}] if deny else [])
    made = lz.compile(model, *inputs, precision="float32")
    made(*inputs)
    return lambda: made(*inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"{'':34s} {'without':>10s} {'with':>10s} {'eager':>10s} µs  with ÷ without, with ÷ eager")
    with torch.no_grad():
        for label, model, inputs in cases():
            functions = [compiled(model, inputs, True), compiled(model, inputs, False), lambda: model(*inputs)]  # noqa: B023
            without, own, eager = contest(functions, given.seconds)
            ratios = f"{own / without:6.2f} {own / eager:6.2f}"
            print(f"{label:34s} {without * 1e6:10.1f} {own * 1e6:10.1f} {eager * 1e6:10.1f}     {ratios}", flush=True)


if __name__ == "__main__":
    main()
