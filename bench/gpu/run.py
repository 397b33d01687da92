"""The GPU table: every kernel of every row timed side by side, eager and replayed in a graph, against plain torch.

    python bench/gpu/run.py --out results

Each row is tuned in a process that may be lost without losing the others. Everything found so far is in the JSON file
after every few rows; the end of the output is the summary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import table
import workload
from serving import Server

#: Parts of the budget that regret may take: on held-out calls, and on tuned ones.
HELD_OUT, TUNED = 0.35, 0.35
#: How far tuning may go beyond the budget, for what compiling takes.
BEYOND = 1.25
#: Seconds after which a row is given up. Kernels that compile for minutes must have done so before.
ROW_TIMEOUT = 150.0
LEAST_S, MOST_S = 0.2, 4.0
#: Seconds that are kept for the page and the figures.
LAST_S = 30.0
#: Rows between two writes.
EVERY = 5

Task = tuple[workload.Row, str]


def by_turns(rows: Sequence[workload.Row]) -> list[workload.Row]:
    """The rows, of each family in turn: however early the time is over, every family was begun."""
    families: dict[str, list[workload.Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    longest = max(map(len, families.values()), default=0)
    return [rows[i] for i in range(longest) for rows in families.values() if i < len(rows)]


def tasks(rows: Sequence[workload.Row], modes: Sequence[str]) -> list[Task]:
    """Every row in every mode; both modes in a row, so that what was compiled is there."""
    return [(row, mode) for row in by_turns(rows) for mode in row.modes if mode in modes]


def named(task: Task) -> dict[str, Any]:
    """What a row of the table begins with."""
    row, mode = task
    return {
        "op": row.call["op"],
        "family": row.family,
        "shape": row.shape,
        "dtype": row.dtype,
        "mode": mode,
        "call": row.call,
    }


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Table:
    """The run: what was asked for, and what was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begun = time.perf_counter()
        self._folder = Path(options.out)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.db = self._folder / "perfdb.sqlite"
        for old in self._folder.glob("perfdb.sqlite*"):
            old.unlink()
        self._server = Server(str(self.db), options.device)
        self.result: dict[str, Any] = {
            "environment": {},
            "command": "python bench/gpu/run.py " + " ".join(sys.argv[1:]),
            "rows": [],
            "summary": {},
            "regret": {},
            "overhead": {},
            "targets": [],
        }
        self._order = {family: i for i, family in enumerate(workload.families())}

    def run(self) -> None:
        """All parts; none needs another to have succeeded."""
        seconds = min(_seconds(self._options.budget), 0.6 * self.left)
        modes = [mode for mode in workload.MODES if self._options.device != "cpu" or mode == workload.EAGER]
        chosen = self._chosen(workload.rows())
        parts = (
            ("environment", self._environment),
            ("overhead", self._overhead),
            ("tune", lambda: self._tune(tasks(chosen, modes), seconds)),
            ("held out", lambda: self._regret("held_out", tasks(self._held_out(), modes), seconds * HELD_OUT)),
            ("tuned", lambda: self._regret("tuned", tasks(chosen, modes), seconds * TUNED)),
        )
        for name, part in parts:
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the other parts go on
                say(f"{name} failed: {type(error).__name__}: {error}")
                self.result.setdefault("failures", {})[name] = f"{type(error).__name__}: {error}"
            self.write()
            say(f"{name}: done at {time.perf_counter() - self._begun:.0f} s")
        self._server.stop()

    @property
    def left(self) -> float:
        """Seconds until everything must be done."""
        return _seconds(self._options.limit) - (time.perf_counter() - self._begun)

    def _chosen(self, rows: Sequence[workload.Row]) -> list[workload.Row]:
        wanted = self._options.families.split(",") if self._options.families else workload.families()
        kept = [row for row in rows if row.family in wanted]
        return workload.quick(kept) if self._options.quick else kept

    def _held_out(self) -> list[workload.Row]:
        return self._chosen(workload.held_out())

    def _environment(self) -> None:
        answer = self._server.ask({"do": "environment"}, timeout=240.0)
        self.result["environment"] = answer.get("environment") or {"error": answer.get("error")}
        for name, value in self.result["environment"].items():
            print(f"{name}: {json.dumps(value) if isinstance(value, dict) else value}", flush=True)

    def _asked(
        self, do: str, todo: Sequence[Task], seconds: float, until: float
    ) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Asks about each in turn. What is left of the time is shared by those that are left."""
        begun = time.perf_counter()
        for i, task in enumerate(todo):
            spent = time.perf_counter() - begun
            if spent > until or self.left < LAST_S:
                yield task, {"error": "no time left"}
                continue
            share = min(max((seconds - spent) / (len(todo) - i), LEAST_S), MOST_S)
            row, mode = task
            question = {"do": do, "call": row.call, "mode": mode, "budget": share, "samples": self._options.samples}
            answer = self._server.ask(question, min(ROW_TIMEOUT, self.left))
            what = f"{do} {i + 1}/{len(todo)} {row.family} {row.shape} {mode}"
            say(
                f"{what}: {answer['took_s']:.1f} s of {share:.1f}; {seconds - (time.perf_counter() - begun):.0f} s left"
            )
            for wrong in ("error", "lost"):
                if answer.get(wrong):
                    say(f"  {wrong}: {answer[wrong]}")
            yield task, answer

    def _tune(self, todo: Sequence[Task], seconds: float) -> None:
        for i, (task, answer) in enumerate(self._asked("tune", todo, seconds, seconds * BEYOND)):
            row = table.row_of(named(task), answer)
            if answer.get("lost"):
                row["lost"] = answer["lost"]
            self.result["rows"].append(row)
            if row["error"]:
                say(f"  {row['error']}")
            else:
                ratio = row["times_default"]
                say(
                    f"  {row['chosen']} {row['chosen_us']:.1f} µs, {f'{ratio:.2f}' if ratio else '–'} × {row['default']}"
                )
            if i % EVERY == 0:
                self.write()
        self.result["rows"].sort(key=lambda row: self._order[row["family"]])

    def _regret(self, name: str, todo: Sequence[Task], seconds: float) -> None:
        found = []
        for task, answer in self._asked("regret", todo, seconds, seconds):
            if answer.get("error") != "no time left":
                found.append((named(task), answer))
            if len(found) % EVERY == 0:
                self.result["regret"][name] = table.regret_of(found)
        self.result["regret"][name] = {**table.regret_of(found), "asked": len(todo)}
        self.result["regret"]["tuned_in_sample"] = table.in_sample(self.result["rows"])

    def _overhead(self) -> None:
        answer = self._server.ask({"do": "overhead"}, timeout=min(120.0, self.left))
        self.result["overhead"] = answer.get("overhead") or {"error": answer.get("error")}

    @property
    def name(self) -> str:
        """What the device is called in file names."""
        gpu = str(self.result["environment"].get("gpu") or "unknown").lower()
        words = [word for word in re.split(r"[^a-z0-9]+", gpu) if word and word not in ("nvidia", "geforce")]
        return "-".join(words) or "unknown"

    def write(self) -> None:
        """Everything found so far."""
        self.result["summary"] = table.summary(self.result["rows"])
        self.result["targets"] = table.targets(self.result)
        self.result["seconds"] = round(time.perf_counter() - self._begun, 1)
        self.result["processes"] = self._server.starts
        path = self._folder / f"{self.name}.json"
        fresh = path.with_suffix(".json.new")
        fresh.write_text(json.dumps(_finite(self.result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, path)

    def report(self) -> None:
        """The page, then figures where matplotlib is there and the time suffices."""
        page = [sys.executable, "-m", "layerzero", "report", "--db", str(self.db), "-o"]
        page += [
            str(self._folder / f"{self.name}.html"),
            "--title",
            f"Kernels on {self.result['environment'].get('gpu')}",
        ]
        for more in ([], ["--png", str(self._folder / "figures")]):
            try:
                done = subprocess.run(
                    [*page, *more], capture_output=True, text=True, timeout=max(self.left, 20.0), check=False
                )
            except (OSError, subprocess.SubprocessError) as error:
                say(f"report: {error}")
                continue
            if done.returncode != 0:
                say(f"report: {(done.stderr or done.stdout).strip()[-300:]}")

    def show(self) -> None:
        """The tables, and last the summary."""
        for family in dict.fromkeys(row["family"] for row in self.result["rows"]):
            print(table.family_table(family, [row for row in self.result["rows"] if row["family"] == family]) + "\n")
        for name, row in self.result["overhead"].items():
            print(f"overhead of {name}: {json.dumps(row)}")
        print(f"\n{self.result['seconds']} s, {self.result['processes']} processes; {self._folder / self.name}.json\n")
        print(table.short(self.result), flush=True)


def _finite(value: Any) -> Any:
    """The same with what JSON has no word for left out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _seconds(text: str) -> float:
    from layerzero.tuning.api import seconds

    return seconds(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="the folder for everything that is written")
    parser.add_argument("--budget", default="300s", help="how long tuning may take, both modes (300s)")
    parser.add_argument("--limit", default="550s", help="how long everything together may take (550s)")
    parser.add_argument("--samples", type=int, default=8, help="rounds each row gets at least (8)")
    parser.add_argument("--quick", action="store_true", help="two rows of each family")
    parser.add_argument("--families", help="only these, with commas between: " + ", ".join(workload.families()))
    parser.add_argument("--device", default="cuda", help="the device (cuda); cpu tries the command itself")
    options = parser.parse_args(arguments)
    unknown = set((options.families or "").split(",")) - set(workload.families()) - {""}
    if unknown:
        parser.error(f"no families: {', '.join(sorted(unknown))}")
    for time_to_spend in (options.budget, options.limit):
        _seconds(time_to_spend)
    run = Table(options)
    run.run()
    run.report()
    run.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
