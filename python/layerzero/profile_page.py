"""The profile of a compiled model as an HTML page: one file, without scripts, fonts or images from elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from layerzero import devices
from layerzero.graph_answers import TimedStep

_STYLE = """
:root { color-scheme: light dark; --ink: #161a21; --muted: #56606d; --line: #d9dee6; --back: #fff; --bar: #5b8def; --floor: #08815f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --muted: #98a2b0; --line: #2c333d; --back: #14171c; --bar: #4f7fdb; --floor: #3fbf94; }
}
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--muted); margin: .25rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
td.bar { width: 16%; min-width: 7rem; } td.bar div { height: .8rem; background: var(--bar); border-radius: 2px; min-width: 1px; }
td.bar div div { background: var(--floor); } code { font: 13px ui-monospace, monospace; overflow-wrap: break-word; }
"""


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at most, where that is known."""

    gbytes: float | None = None
    gflops: float | None = None

    def floor_us(self, step: TimedStep) -> float | None:
        """The least time a step can take."""
        floors = []
        if self.gbytes:
            floors.append(step.gbytes * step.us / self.gbytes)
        if self.gflops:
            floors.append(step.gflops * step.us / self.gflops)
        return max(floors) if floors else None


def ceilings() -> Ceilings:
    """Those of this machine's CPU, in float32."""
    device = devices.cpu()
    tflops = device.get("peak_tflops", {}).get("float32")
    return Ceilings(device.get("bandwidth_gbs"), tflops and tflops * 1e3)


def page(model: str, where: str, steps: Sequence[TimedStep], limits: Ceilings) -> str:
    """The page. Steps are sorted by their time."""
    total = sum(step.us for step in steps)
    found = sorted(enumerate(steps), key=lambda pair: -pair[1].us)
    longest = max((step.us for step in steps), default=0.0) or 1.0
    has_floor = limits.gbytes is not None or limits.gflops is not None
    head = ["step", "operation", "time", "", "share", "kernel", "GFLOP/s", "GB/s"]
    numbers = {"step", "time", "share", "GFLOP/s", "GB/s", "floor ÷ time"}
    if has_floor:
        head.append("floor ÷ time")
    rows = [_row(at, step, longest, limits.floor_us(step) if has_floor else None) for at, step in found]
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        by_kernel[step.kernel].append(step.us)
    kernels = sorted(by_kernel.items(), key=lambda pair: -sum(pair[1]))
    sums = [
        f"<tr><td><code>{escape(kernel)}</code></td><td class=n>{len(times)}</td><td class=n>{sum(times):.1f} µs</td>"
        f"<td class=n>{_share(sum(times), total)}</td></tr>"
        for kernel, times in kernels
    ]
    note = (
        "Green: the floor, the least time in which this machine can move a step's bytes and do its operations."
        if has_floor
        else "The peaks of this machine are not known, so there are no floors."
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(model)}: profile</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(model)}</h1>
<p>{len(steps)} steps, {total:.1f} µs, on {escape(where)}. Times are medians. {note}</p>
<h2>Steps by time</h2>
<div class=wide><table>
<thead><tr>{"".join(f"<th{' class=n' if one in numbers else ''}>{one}</th>" for one in head)}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody>
</table></div>
<h2>Kernels</h2>
<div class=wide><table>
<thead><tr><th>kernel</th><th class=n>steps</th><th class=n>time</th><th class=n>share</th></tr></thead>
<tbody>
{chr(10).join(sums)}
</tbody>
</table></div>
</body>
</html>
"""


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"


def _row(at: int, step: TimedStep, longest: float, floor: float | None) -> str:
    reached = None if floor is None or not step.us else floor / step.us
    inside = "" if reached is None else f'<div style="width:{min(100 * reached, 100):.1f}%"></div>'
    origin = f"<br><code>{escape(step.origin)}</code>" if step.origin else ""
    cells = [
        f"<td class=n>{at}</td>",
        f"<td>{escape(step.op)}{origin}</td>",
        f"<td class=n>{step.us:.2f} µs</td>",
        f'<td class=bar><div style="width:{100 * step.us / longest:.1f}%">{inside}</div></td>',
        f"<td class=n>{100 * step.share:.1f} %</td>",
        f"<td><code>{escape(step.kernel)}</code></td>",
        f"<td class=n>{step.gflops:.1f}</td>",
        f"<td class=n>{step.gbytes:.1f}</td>",
    ]
    if reached is not None:
        cells.append(f"<td class=n>{100 * reached:.0f} %</td>")
    return f"<tr>{''.join(cells)}</tr>"
