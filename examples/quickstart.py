"""The story in one page: what is here, what ran, why, a kernel of one's own, and what an error looks like.

`make demo` runs this. It needs torch, no GPU, and a few seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import layerzero as lz
import torch
import torch.nn.functional as F
from torch import Tensor


def heading(text: str) -> None:
    """A line that stands out, in colour where there is a terminal."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"\n{bold}{text}{plain}")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the first row is the heads."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for i, row in enumerate(rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if i == 0:
            print("  " + "  ".join("─" * width for width in widths))


def why(report: lz.SelectionReport) -> str:
    """The reason for a choice in a few words."""
    accepted = [candidate for candidate in report.candidates if candidate.accepted]
    best = accepted[0]
    if best.time_us is not None:
        return f"fastest of {len(accepted)}: {best.time_us:.1f} µs"
    terms = ", ".join(f"{name} {value:+.0f}" for name, value in (best.terms or {}).items() if value)
    return f"first of {len(accepted)} that can ({terms or 'last resort'})"


def compare(name: str, got: Tensor, plain: Callable[[], Tensor], *call: Any, **named: Any) -> list[str]:
    """One row: the operation, the kernel that ran and why, and how far its result is from plain torch."""
    report = lz.explain(name, *call, **named)
    difference = (got.double() - plain().double()).abs().max().item()
    return [report.op, "×".join(map(str, got.shape)), report.chosen or "", why(report), f"{difference:.1g}"]


def main() -> None:
    """Runs the whole story."""
    torch.manual_seed(0)
    heading("1. What machine is this, and which libraries are on it?")
    lz.doctor()

    heading("2. Three calls: which kernel ran, why, and how far is it from plain torch?")
    # Grouped-query attention: eight query heads share two key/value heads.
    q = torch.randn(2, 256, 8, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 256, 2, 64, dtype=torch.bfloat16)
    x, weight = torch.randn(4, 1024), torch.rand(1024)
    logits = 4.0 * torch.randn(8, 32_000)

    attended = lz.attention(q, k, v, causal=True)
    normed = lz.rms_norm(x, weight)
    ids = lz.sample_topp(logits, 0.9, seed=7)

    def plain_attention() -> Tensor:
        wide_q, wide_k, wide_v = (t.transpose(1, 2).float() for t in (q, k, v))
        out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    def plain_top_p() -> Tensor:
        # Not the same draw, but the same question: is every id in the nucleus of its row?
        p, order = logits.softmax(-1).sort(-1, descending=True)
        nucleus = (p.cumsum(-1) - p < 0.9).sum(-1)
        rank = (order == ids[:, None]).int().argmax(-1)
        return torch.where(rank < nucleus, ids, -1)

    rows = [
        compare("attention", attended, plain_attention, q, k, v),
        compare("rms_norm", normed, lambda: F.rms_norm(x, (1024,), weight, 1e-6), x, weight),
        compare("sample_topp", ids, plain_top_p, logits, 0.9),
    ]
    table([["operation", "result", "kernel", "why", "differs by"], *rows])

    heading("3. Why? Every candidate of one decision, with its score or the reasons against it.")
    print(lz.explain("attention", q, k, v, softcap=30.0))

    heading("4. A kernel of one's own.")

    @lz.register_kernel(
        operation="norm.rms",
        kernel_id="quickstart.rms_norm",
        platform="cpu",
        supported_dtypes=[torch.float32],
        layouts=["strided"],
        priority=90,
        dims={"hidden": {"max": 4096}},
    )
    def my_rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        scaled = input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)
        return scaled if weight is None else scaled * weight

    difference = (lz.rms_norm(x, weight) - normed).abs().max().item()
    print(f"  now chosen: {lz.which('rms_norm', x, weight).kernel_id}, off by {difference:.1g}")
    accepted, reasons = lz.validate("quickstart.rms_norm", torch.randn(4, 8192))
    print(f"  for wider rows: {accepted}, {'; '.join(map(str, reasons))}")
    lz.unregister_kernel("quickstart.rms_norm")
    print(f"  taken away again: {lz.which('rms_norm', x, weight).kernel_id}")

    heading("5. What an error looks like.")
    try:
        lz.attention(q, k, v, causal=True, attn_mask=torch.ones(256, 256, dtype=torch.bool))
    except lz.LayerZeroError as error:
        print("  " + str(error).replace("\n", "\n  "))

    print("\nNext: docs/guide.md for every operation, examples/plugin for a backend of your own.")


if __name__ == "__main__":
    main()
