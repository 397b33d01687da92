"""The package as servers see an installed one: by its entry points."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def entry_points(folder: Path) -> None:
    """Makes `folder` a place, for `PYTHONPATH`, where the entry points of the checkout's package are found."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0.0\n", encoding="utf-8"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def environment(folder: Path) -> dict[str, str]:
    """This process's environment, for one that finds the package and its entry points in `folder`."""
    paths = [str(folder), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LAYERZERO_PERFDB_PRIORS": "false",
    }
