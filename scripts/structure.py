"""Which files of the engine use which: the floors they stand on, and that no two use each other.

``python scripts/structure.py`` prints the floors with their files and lines, and exits with 1 when a file uses one of a higher
floor or there is a cycle. What a file uses is read from its ``use`` lines and paths; names that a module re-exports count
for the file they come from.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "crates" / "layerzero" / "src"
#: The floors, the lowest first; files that are in no folder of these are on the ground.
FLOORS = ("ground", "core", "services", "engine")

Module = tuple[str, ...]


def _module(path: str) -> Module:
    parts = path.removesuffix(".rs").split("/")
    return tuple(parts[:-1] if parts[-1] in ("mod", "lib") else parts)


def _expanded(tree: str) -> list[str]:
    """``a::{b, c::{d, e}}`` as ``a::b``, ``a::c::d``, ``a::c::e``."""
    tree = tree.strip()
    if not tree.endswith("}"):
        return [tree.split(" as ")[0].strip()]
    prefix, inner = tree[:-1].split("{", 1)
    parts, depth = [""], 0
    for sign in inner:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [path for part in parts if part.strip() for path in _expanded(prefix + part.strip())]


class Sources:
    """Rust files by path, and where their names lead."""

    def __init__(self, files: dict[str, str]) -> None:
        # Without comments, and without tests, which stand at the end.
        self.files = {path: re.sub(r"//.*", "", text).split("#[cfg(test)]")[0] for path, text in files.items()}
        self.modules = {_module(path): path for path in files if path != "lib.rs"}
        self.exported: dict[tuple[Module, str], Module] = {}
        for path in self.files:
            for public, used in self._uses(path):
                if public:
                    self.exported[_module(path), used[-1]] = used

    @staticmethod
    def read(folder: Path) -> Sources:
        return Sources({str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.rs"))})

    def _uses(self, path: str) -> Iterator[tuple[bool, Module]]:
        """What a file names, as paths from the root, and whether it re-exports it."""
        for public, tree in re.findall(r"^\s*(pub(?:\([a-z ]+\))?\s+)?use ([^;]+);", self.files[path], re.MULTILINE):
            for name in _expanded(tree):
                if (absolute := self._absolute(path, name)) is not None:
                    yield bool(public), absolute
        for name in re.findall(r"(?<!use )\bcrate::([\w:]+)", self.files[path]):
            yield False, tuple(name.split("::"))

    def _absolute(self, path: str, name: str) -> Module | None:
        here, parts = list(_module(path)), name.split("::")
        match parts[0]:
            case "crate":
                return tuple(parts[1:])
            case "self":
                return tuple(here + parts[1:])
            case "super":
                while parts[0] == "super":
                    here, parts = here[:-1], parts[1:]
                return tuple(here + parts)
            case first if (*here, first) in self.modules:
                return tuple(here + parts)
        return None

    def _home(self, name: Module) -> str | None:
        """The file a name comes from."""
        for _ in range(8):
            known = next((n for n in range(len(name), 0, -1) if name[:n] in self.modules), 0)
            if known < len(name) and (name[:known], name[known]) in self.exported:
                name = self.exported[name[:known], name[known]] + name[known + 1 :]
            else:
                return self.modules.get(name[:known])
        return None

    def edges(self) -> dict[str, set[str]]:
        """By file, the files it uses. What ``mod.rs`` only hands on is not its own use."""
        found: dict[str, set[str]] = {path: set() for path in self.files if path != "lib.rs"}
        for path, used in found.items():
            for public, name in self._uses(path):
                home = self._home(name)
                if home not in (None, path) and not (public and path.endswith("mod.rs")):
                    used.add(str(home))
        return found


def floor(path: str) -> int:
    """The number of the floor a file stands on."""
    folder = path.split("/")[0]
    return FLOORS.index(folder) if folder in FLOORS else 0


def upward(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The uses that lead to a higher floor."""
    return sorted((path, used) for path, all_used in edges.items() for used in all_used if floor(used) > floor(path))


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that use each other, directly or by way of others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for used in edges[left.pop()] - seen:
                seen.add(used)
                left.append(used)
        return seen

    reach = {path: reachable(path) for path in edges}
    groups = {
        tuple(sorted({path} | {o for o in reach[path] if path in reach[o]})) for path in edges if path in reach[path]
    }
    return [list(group) for group in sorted(groups)]


def main() -> int:
    """Prints the floors; 1 when the structure is broken."""
    sources = Sources.read(SOURCE)
    edges = sources.edges()
    for number, name in reversed(list(enumerate(FLOORS))):
        here = sorted(path for path in edges if floor(path) == number)
        lines = sum(len((SOURCE / path).read_text().splitlines()) for path in here)
        print(f"{name}: {len(here)} files, {lines} lines\n  {', '.join(here)}")
    broken = [f"{path} uses {used}, a floor above" for path, used in upward(edges)]
    broken += [f"use each other: {', '.join(group)}" for group in cycles(edges)]
    print("\n".join(broken) or "no cycle, and nobody uses a floor above")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
