"""Are the crates of the native module compiled with the same features as for the Rust tests?

    python3 scripts/shared_crates.py

A crate with other features is compiled again, and with it all that depend on it: half of our crates, two CPU minutes.
`make lint` runs this. Where it fails, name the features that it prints in `crates/lz-python/Cargo.toml`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def features(*options: str) -> dict[str, set[str]]:
    """The features that each crate is compiled with, by name and version; more than one set where it is compiled twice."""
    command = ["cargo", "tree", "--locked", "--prefix", "none", "--format", "{p}|{f}", *options]
    told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, set[str]] = {}
    for line in told.stdout.splitlines():
        crate, bar, names = line.removesuffix(" (*)").partition("|")
        if bar:
            found.setdefault(crate, set()).add(names)
    return found


def main() -> int:
    """Compares, and prints what differs."""
    module = features("-p", "lz-python", "-e", "normal,build")
    tests = features("--workspace", "-e", "normal,build,dev")
    differ = {crate: names for crate, names in module.items() if names != tests[crate]}
    for crate, names in differ.items():
        print(
            f"{crate} is compiled twice: with {names} in the module, with {tests[crate]} in the tests", file=sys.stderr
        )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
