"""Draws the chart of the README, `docs/assets/h200.svg`: how much faster than plain torch each kind of call is on an H200.

The figures are those of one run in `bench/results`. With `--check` nothing is written; it ends with 1 when the chart is
out of date.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The run that is drawn: the newest complete one.
RUN = ROOT / "bench" / "results" / "runs" / "2026-11-17-h200-table-17.json"
CHART = ROOT / "docs" / "assets" / "h200.svg"

LABELS = {
    "quantize": "quantize (int8, fp8)",
    "softcap": "attention, softcap",
    "window": "attention, sliding window",
    "topp": "top-p sampling",
    "rope": "rotary embedding",
    "topk": "top-k sampling",
    "paged": "paged decode",
    "mla": "latent attention (MLA)",
    "cascade": "paged decode, shared prompt",
    "silu_mul_halves": "silu·mul of one projection's halves",
    "add_rms_norm": "residual add + rms_norm",
    "rms_norm": "rms_norm",
    "silu_mul": "silu·mul",
    "layer_norm": "layer_norm",
    "prefill": "attention, prefill",
    "decode": "attention, decode",
    "gelu": "gelu",
    "vit": "attention, ViT",
    "cross": "cross attention",
}

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 250, 70, 78, 22
MOST = 64.0

STYLE = """
  .back { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 15px } .small { font-size: 12px; fill: #59636e }
  .grid { stroke: #d1d9e0 } .one { stroke: #59636e; stroke-width: 1.5 }
  .bar { fill: #2f6fdb } .range { stroke: #1f2328; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } text { fill: #f0f6fc } .small { fill: #9198a1 }
    .grid { stroke: #3d444d } .one { stroke: #9198a1 } .bar { fill: #4c8df6 } .range { stroke: #f0f6fc }
  }
"""


def across(times: float) -> float:
    """Where a speed-up lies on the logarithmic axis."""
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(times) / math.log(MOST)


def figure(times: float) -> str:
    """A speed-up, with as many digits as mean something."""
    return f"{times:.2f}×" if times < 10 else f"{times:.1f}×"


def draw(run: dict[str, Any]) -> str:
    """The chart of a run, as SVG."""
    summary, environment = run["summary"], run["environment"]
    kinds = sorted(LABELS, key=lambda kind: -summary[kind]["geomean_times_default"])
    bottom = TOP + ROW * len(kinds)
    height = bottom + 44
    every = summary["all"]
    every_mean = figure(every["geomean_times_default"])
    below = (
        f"Bar: geometric mean. Line: slowest to fastest row. All {every['rows']} rows: {every_mean}. Logarithmic axis."
    )
    day, torch = environment["date"].split()[0], environment["torch"]
    source = f"{day}, torch {torch}, tuned; eager calls and CUDA graph replays; bench/results/runs/{RUN.name}"
    box, size = f"0 0 {WIDTH} {height}", f'width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {size} role="img" aria-labelledby="title">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" id="title" x="16" y="26">Speed-up over plain torch on an {environment["gpu"]}</text>',
        f'<text class="small" x="16" y="46">{below}</text>',
    ]
    for mark in (1, 2, 4, 8, 16, 32, 64):
        x = across(mark)
        kind = "one" if mark == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>')
        lines.append(f'<text class="small" x="{x:.1f}" y="{TOP - 12}" text-anchor="middle">{mark}×</text>')
    for number, kind in enumerate(kinds):
        of = summary[kind]
        mean, least, most = of["geomean_times_default"], of["least"], of["most"]
        y = TOP + ROW * number + 3
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 12}" text-anchor="end">{LABELS[kind]}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{across(mean) - LEFT:.1f}" height="15" rx="2"/>',
            f'<line class="range" x1="{across(least):.1f}" y1="{y + 7.5}" x2="{across(most):.1f}" y2="{y + 7.5}"/>',
            f'<text x="{WIDTH - 12}" y="{y + 12}" text-anchor="end">{figure(mean)}</text>',
        ]
    lines += [
        f'<text class="small" x="16" y="{height - 16}">{source}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the chart, or checks it."""
    made = draw(json.loads(RUN.read_text(encoding="utf-8")))
    if "--check" not in sys.argv[1:]:
        CHART.parent.mkdir(exist_ok=True)
        CHART.write_text(made, encoding="utf-8")
    elif not CHART.exists() or CHART.read_text(encoding="utf-8") != made:
        sys.exit(f"{CHART} is not what {RUN.name} says: run scripts/chart.py")


if __name__ == "__main__":
    main()
