"""Writes the reference pages that follow from the sources: the command line, the reason codes, the files' schemas.

With `--check` nothing is written; it ends with 1 when a page is out of date. The command line is asked for its own help, so
the native module must be built (`make develop`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REASONS = ROOT / "crates" / "lz-model" / "src" / "reason.rs"
NOTE = "<!-- Written by scripts/reference.py: `make reference` writes it again. -->"
WIDTH = 110


def said(text: str) -> str:
    """Help as a block of text, its lines wrapped and without trailing spaces."""
    lines: list[str] = []
    for line in text.rstrip().splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def help_of(*command: str) -> str:
    """What a command prints with `--help`."""
    run = [sys.executable, "-m", "layerzero", *command, "--help"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LAYERZERO_", "XDG_"))}
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    # Help that names a folder of yours names it from the home directory.
    settings = {**kept, "HOME": "~", "NO_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": path}
    return subprocess.run(run, capture_output=True, text=True, check=True, env=settings).stdout


def own(text: str) -> str:
    """Help without the options that every command has."""
    shared = r"^ +(?:--json|--config <FILE>|--color <WHEN>|-h, --help)\n(?:(?: {10}.*)?\n)*?(?=^ {2,8}-|^\S|\Z)"
    return re.sub(r"^Options:\n(?=\S|\Z)", "", re.sub(shared, "", text, flags=re.MULTILINE), flags=re.MULTILINE)


def commands(text: str) -> list[str]:
    """The commands that a help text lists."""
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    found = re.findall(r"^  ([a-z][a-z-]*)  ", listed[1], re.MULTILINE) if listed else []
    return [name for name in found if name != "help"]


def command_pages(*before: str) -> Iterator[str]:
    """A command's section, then those of its own commands."""
    text = help_of(*before)
    if before:
        yield f"{'#' * (len(before) + 1)} layerzero {' '.join(before)}\n\n{said(own(text))}"
    for name in commands(text):
        yield from command_pages(*before, name)


def command_line() -> str:
    """The page of the command line."""
    start = (
        f"# Command line\n\n{NOTE}\n\nWhat `layerzero COMMAND --help` prints. `python -m layerzero` is the same command. "
        "Every command takes `--json`, `--config FILE`, `--color WHEN` and `--help` as well.\n"
    )
    return "\n".join([start, said(help_of()), *command_pages()])


def screaming(name: str) -> str:
    """A variant's name as its code."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def reasons() -> str:
    """The page of the reason codes, from the enum that defines them."""
    source = REASONS.read_text(encoding="utf-8")
    body = source.split("pub enum Reason {")[1].split("\n}")[0]
    item = re.compile(
        r"// --- (?P<section>[^\n]+?) -+\n|"
        r"(?P<doc>(?:    /// [^\n]*\n)+)    #\[error\(\s*\"(?P<message>.*?)\"\s*\)\]\n    (?P<name>\w+)",
        re.DOTALL,
    )
    lines = [
        f"# Reason codes\n\n{NOTE}\n",
        "Why a kernel cannot serve a call. `lz.explain` shows the reasons of every candidate, `lz.validate` those of one kernel, and",
        "`NoKernelFoundError.failures` those of a call that no kernel could serve. A reason has a stable `code`, a `message` and its",
        "`fields`; names in braces are fields. [Troubleshooting](troubleshooting.md) says what to do.",
    ]
    for found in item.finditer(body):
        if found["section"]:
            lines += [f"\n## {found['section'].capitalize()}\n", "| code | message | meaning |", "|---|---|---|"]
        else:
            meaning = " ".join(line.strip().removeprefix("///").strip() for line in found["doc"].splitlines())
            message = found["message"].replace("|", "\\|")
            lines.append(f"| `{screaming(found['name'])}` | {message} | {meaning} |")
    return "\n".join(lines) + "\n"


#: The files people write or read, and what they are.
SCHEMAS = {
    "capabilities-1.0.schema.json": "What a backend says of its kernels: `lz.register_backend`, [your own kernels](extend.md).",
    "dispatch-table-1.0.schema.json": "Decisions by buckets of sizes: `layerzero solve`, `lz.decide`, [pinning](pin.md).",
    "device.schema.json": "A device that is not here: `layerzero explain --device FILE`.",
    "config.schema.json": "`layerzero.yaml`. Its keys, defaults and meanings are in the [settings](settings.md).",
}


def kind(of: Any) -> str:
    """The type of a schema in a few words."""
    if not isinstance(of, dict):
        return "anything"
    if name := of.get("$ref"):
        return f"[{name.rpartition('/')[2]}](#{name.rpartition('/')[2].lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in of:
            return " or ".join(dict.fromkeys(kind(one) for one in of[several]))
    if "const" in of:
        return f"`{json.dumps(of['const'])}`"
    if "enum" in of:
        return " or ".join(f"`{json.dumps(one)}`" for one in of["enum"])
    types = of.get("type", "anything")
    types = [types] if isinstance(types, str) else types
    words = []
    for one in types:
        if one == "array" and "items" in of:
            words.append(f"list of {kind(of['items'])}")
        elif one == "object" and isinstance(of.get("additionalProperties"), dict):
            words.append(f"map to {kind(of['additionalProperties'])}")
        else:
            words.append(one)
    return " or ".join(words)


def prose(of: dict[str, Any]) -> str:
    """A description in one line, without the example that its Rust type has."""
    text = re.sub(r"```.*?```", "", of.get("description", ""), flags=re.DOTALL)
    return " ".join(text.split()).replace("|", "\\|")


def keys(of: dict[str, Any]) -> list[str]:
    """The keys of an object, or the values of an enumeration, as a table."""
    if of.get("properties"):
        rows = ["| key | type | meaning |", "|---|---|---|"]
        for name, value in of["properties"].items():
            needed = ", required" if name in of.get("required", []) else ""
            rows.append(f"| `{name}` | {kind(value)}{needed} | {prose(value)} |")
        return rows
    values = [one for one in of.get("oneOf", []) if "const" in one]
    return (
        ["| value | meaning |", "|---|---|", *(f"| `{one['const']}` | {prose(one)} |" for one in values)]
        if values
        else []
    )


def schemas() -> str:
    """The page of the files' schemas."""
    parts = [
        f"# Files and their schemas\n\n{NOTE}\n",
        "JSON Schemas of the files LayerZero reads and writes. An editor that knows JSON Schema completes and checks them.",
        "`layerzero schema NAME` prints them.",
    ]
    seen: set[str] = set()
    for name, what in SCHEMAS.items():
        schema = json.loads((ROOT / "schemas" / name).read_text(encoding="utf-8"))
        parts.append(f"\n## {name.partition('.schema')[0]}\n\n{what} Schema: [{name}](../schemas/{name}).\n")
        if name.startswith("config"):
            continue
        parts += keys(schema)
        for definition, of in schema.get("$defs", {}).items():
            if definition in seen:
                continue
            seen.add(definition)
            parts += [f"\n### {definition}\n", prose(of) + "\n", *keys(of)]
    return "\n".join(parts).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {"cli.md": command_line, "reasons.md": reasons, "schemas.md": schemas}


def main() -> None:
    """Writes the pages, or checks them."""
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is out of date: run `make reference`")


if __name__ == "__main__":
    main()
