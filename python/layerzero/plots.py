"""Figures of what was measured, as PNG files. They show what the page of ``layerzero report`` shows.

>>> import json, subprocess
>>> report = json.loads(subprocess.check_output(["layerzero", "report", "--json"]))  # doctest: +SKIP
>>> layerzero.plots.write(report, "figures")  # doctest: +SKIP
[PosixPath('figures/speedup.png'), PosixPath('figures/winners-norm.rms.png'), PosixPath('figures/regret.png')]
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero import _native
from layerzero.errors import LayerZeroError

# A figure of more bars than this cannot be read; the others go to a second one.
BARS = 50
GREY = "#8b929d"
INK = "#161a21"
MUTED = "#56606d"
LINE = "#d9dee6"
BEST, LOST = "#08815f", "#e07a0f"


def write(report: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Draws what ``layerzero report --json`` printed into ``folder``, which is made, and gives the files.

    Speed over the baseline (all operations, and call by call), who wins where, and regret; what was not measured has no
    figure. Needs matplotlib, which ``pip install 'layerzero-kernels[plots]'`` brings.
    """
    plotting = _matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    # Names may contain what matplotlib would take for formulas, and letters its font does not have.
    with plotting.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        for name, figure in _figures(report):
            # Two operations whose names differ only in what file names cannot have.
            free = (n for n in itertools.count(1) if _file(folder, name, n) not in files)
            path = _file(folder, name, next(free))
            figure.savefig(path, dpi=120, bbox_inches="tight", facecolor="white")
            files.append(path)
    return files


def _file(folder: Path, name: str, number: int) -> Path:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:100]
    return folder / f"{plain}{'' if number == 1 else f'-{number}'}.png"


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise LayerZeroError(
            "figures are drawn with matplotlib, which is not installed",
            code="MISSING_LIBRARY",
            hint="pip install 'layerzero-kernels[plots]'",
        ) from error


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    groups = _groups(report)
    if groups:
        yield "speedup", _overview(report, groups)
    for (_, op), contests in groups.items():
        for start in range(0, len(contests), BARS):
            yield f"speedup-{op}", _bars(report, op, contests[start : start + BARS])
    for grid in report.get("maps") or []:
        yield f"winners-{grid['op']}", _winners(report, grid)
    if report.get("lost") and (report.get("regret") or {}).get("rows"):
        yield "regret", _regret(report)


def _groups(report: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The calls of which the speed over the baseline is known, by device and operation."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for contest in report.get("contests") or []:
        ratio = contest.get("times_baseline")
        if ratio is not None and math.isfinite(ratio) and ratio > 0:
            groups.setdefault((contest["device"], contest["op"]), []).append(contest)
    for contests in groups.values():
        contests.sort(key=_place)
    return groups


def _place(contest: Mapping[str, Any]) -> tuple[Any, ...]:
    """Calls in the order of the page: by dtype, variant and mode, then by sizes: 32 rows before 256."""
    sizes = [int(number) for number in re.findall(r"\d+", contest["label"])]
    return contest["dtype"], contest.get("variant") or "", contest["mode"], sizes, contest["label"]


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """An empty figure that no window or global state knows of."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=MUTED, labelsize=8)
    return figure, axes


def _color(report: Mapping[str, Any], kernel: str | None) -> str:
    return str((report.get("colors") or {}).get(kernel, {}).get("color", GREY))


def _hatch(report: Mapping[str, Any], kernel: str | None) -> str:
    return "///" if (report.get("colors") or {}).get(kernel, {}).get("hatched") else ""


def _mark(report: Mapping[str, Any], kernel: str | None) -> str:
    return str((report.get("colors") or {}).get(kernel, {}).get("mark", "✕" if kernel is None else "?"))


def _ratio(value: float) -> str:
    return f"{value:.0f}×" if value >= 99.5 else f"{value:.3g}×"


def _ratio_axis(axes: Any, ratios: Sequence[float]) -> None:
    """A logarithmic axis that shows 1, with few round ticks."""
    low, high = max(1e-3, min(0.9, *ratios)) / 1.06, min(1e5, max(1.25, *ratios)) * 1.1
    every = max(1, math.ceil(math.log2(high / low) / 7))
    ticks = [2.0 ** (i * every) for i in range(-10, 18) if low <= 2.0 ** (i * every) <= high]
    if len(ticks) < 3:
        ticks = [t for t in (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2) if low <= t <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [_ratio(t) for t in ticks])
    axes.set_xticks([], minor=True)
    axes.axvspan(low, 1, color="#b3261e", alpha=0.06, lw=0)
    axes.grid(axis="x", color=LINE, lw=0.8)
    axes.axvline(1, color=INK, lw=1, alpha=0.6)
    axes.set_axisbelow(True)


def _overview(report: Mapping[str, Any], groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Any:
    """Every call as a dot, operation by operation."""
    figure, axes = _axes(9, 1.1 + 0.36 * len(groups))
    several = len({device for device, _ in groups}) > 1
    names = {machine["id"]: machine["name"] for machine in report.get("machines") or []}
    labels = []
    for row, ((device, op), contests) in enumerate(groups.items()):
        ratios = [contest["times_baseline"] for contest in contests]
        colors = [_color(report, contest.get("chosen")) for contest in contests]
        offsets = [row + (0, -0.16, 0.16, -0.28, 0.28)[i % 5] for i in range(len(contests))]
        axes.scatter(ratios, offsets, s=22, c=colors, edgecolors="white", linewidths=0.6, zorder=3)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        axes.plot([mean, mean], [row - 0.36, row + 0.36], color=INK, lw=2.2, zorder=4)
        labels.append(f"{op}  {_ratio(mean)}" + (f"\n{names.get(device, device)}" if several else ""))
    _ratio_axis(axes, [c["times_baseline"] for contests in groups.values() for c in contests])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    title = "Speed over plain torch: a dot for each call, a bar for the geometric mean"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    meaning = "grey: plain torch's own kernel is chosen; colours: another one, named in the figure of the operation"
    axes.set_xlabel(meaning, fontsize=8, color=MUTED)
    return figure


def _bars(report: Mapping[str, Any], op: str, contests: Sequence[Mapping[str, Any]]) -> Any:
    """The speed over the baseline of each call of an operation."""
    figure, axes = _axes(9, 1.3 + 0.23 * len(contests))
    ratios = [contest["times_baseline"] for contest in contests]
    chosen = [contest.get("chosen") for contest in contests]
    for row, (ratio, kernel) in enumerate(zip(ratios, chosen, strict=True)):
        look = {"color": _color(report, kernel), "hatch": _hatch(report, kernel), "edgecolor": "white", "lw": 0}
        axes.barh(row, ratio - 1, left=1, height=0.72, zorder=3, **look)
        axes.annotate(
            _ratio(ratio), (max(ratio, 1), row), (4, 0), textcoords="offset points", va="center", fontsize=7, color=INK
        )
    _ratio_axis(axes, ratios)
    axes.set_yticks(range(len(contests)), _names(contests))
    axes.set_ylim(len(contests) - 0.4, -0.6)
    axes.set_title(f"{op}: speed over plain torch", loc="left", fontsize=10, color=INK)
    _legend(report, figure, chosen)
    return figure


def _names(contests: Sequence[Mapping[str, Any]]) -> list[str]:
    """What calls are called: by sizes, dtype and mode, and by what else there is where that differs among them."""
    differ = len({contest.get("variant") for contest in contests}) > 1
    parts = (
        [c["label"], *([c["variant"]] if differ and c.get("variant") else []), c["dtype"], c["mode"]] for c in contests
    )
    return [" · ".join(words) for words in parts]


def _winners(report: Mapping[str, Any], grid: Mapping[str, Any]) -> Any:
    """Who wins where."""
    rows, columns = grid["rows"], grid["columns"]
    figure, axes = _axes(1.6 + 0.75 * len(columns), 1.1 + 0.36 * len(rows))
    patches = importlib.import_module("matplotlib.patches")
    for y, cells in enumerate(grid["cells"]):
        for x, cell in enumerate(cells):
            if cell is None:
                continue
            kernel = cell["kernel"]
            look = {"facecolor": _color(report, kernel) if kernel else "white", "hatch": _hatch(report, kernel)}
            axes.add_patch(patches.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, edgecolor="white", lw=0, **look))
            times = cell.get("times_baseline")
            text = _mark(report, kernel) + (f" {_ratio(times)}" if times is not None and math.isfinite(times) else "")
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=_readable(look["facecolor"]))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(grid["across"], fontsize=8, color=MUTED)
    on = f" on {grid['device']}" if grid.get("device") else ""
    axes.set_title(
        f"{grid['op']}{on}: the chosen kernel, and its speed over plain torch", loc="left", fontsize=10, color=INK
    )
    _legend(report, figure, [cell["kernel"] for cells in grid["cells"] for cell in cells if cell])
    return figure


def _readable(color: str) -> str:
    """White or dark, whichever has the better contrast on a colour."""

    def light(channel: str) -> float:
        value = int(channel, 16) / 255
        return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)

    if not re.fullmatch("#[0-9a-fA-F]{6}", color):
        return INK
    luminance = sum(w * light(color[i : i + 2]) for w, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5)))
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.056 else INK


def _legend(report: Mapping[str, Any], figure: Any, kernels: Sequence[str | None]) -> None:
    patches = importlib.import_module("matplotlib.patches")
    known = sorted({kernel for kernel in kernels if kernel is not None})
    handles = [
        patches.Patch(
            facecolor=_color(report, kernel),
            hatch=_hatch(report, kernel),
            edgecolor="white",
            label=f"{_mark(report, kernel)}  {kernel}",
        )
        for kernel in known
    ]
    if handles:
        figure.legend(handles=handles, fontsize=7, frameon=False, loc="outside lower left", ncols=2)


def _regret(report: Mapping[str, Any]) -> Any:
    """How many choices lose how much."""
    figure, axes = _axes(6.5, 3.2)
    lost = report["lost"]
    total = sum(item["calls"] for item in lost)
    bars = axes.bar(
        range(len(lost)), [item["calls"] for item in lost], color=[BEST, *[LOST] * (len(lost) - 1)], width=0.76
    )
    texts = [f"{item['calls']}\n{item['calls'] / total:.0%}" if item["calls"] else "" for item in lost]
    axes.bar_label(bars, texts, fontsize=8, color=INK, padding=2)
    axes.set_xticks(range(len(lost)), [item["lost"] for item in lost])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.2)
    regret = report["regret"]
    summary = f"geometric mean {regret['geomean']:.3f}, worst {regret['worst']:.3f}"
    axes.set_title(f"Time lost against the fastest kernel: {summary}", loc="left", fontsize=10, color=INK)
    return figure


def main(arguments: list[str]) -> int:
    """``layerzero report … --png FOLDER`` or ``--png=FOLDER``: the page as without ``--png``, then its figures."""
    place = next(at for at, argument in enumerate(arguments) if argument.partition("=")[0] == "--png")
    _, given, folder = arguments[place].partition("=")
    rest = arguments[place + 1 :]
    if not given and rest:
        folder, *rest = rest
    if not folder:
        # The command says what is missing.
        return _native.cli(["layerzero", *arguments])
    others = arguments[:place] + rest
    try:
        # Before the page, so that nothing is half done.
        _matplotlib()
    except LayerZeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    code = _native.cli(["layerzero", *others])
    if code == 0:
        # Its figures are of the same database; a page of its own is not written again.
        document = [*(a for a in _without_output(others) if a != "--json"), "--json"]
        asked = "import sys; from layerzero import _native; raise SystemExit(_native.cli(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", asked, "layerzero", *document], stdout=subprocess.PIPE, text=True, check=True
        )
        files = write(json.loads(done.stdout), folder)
        print(f"wrote {len(files)} figures into {folder}", file=sys.stderr if "--json" in others else sys.stdout)
    return code


def _without_output(arguments: Sequence[str]) -> Iterator[str]:
    given = iter(arguments)
    for argument in given:
        if argument in ("-o", "--output"):
            next(given, None)
        elif not argument.startswith(("--output=", "-o")):
            yield argument
