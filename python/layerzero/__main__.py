"""``python -m layerzero``: the command line."""

from __future__ import annotations

import sys
from importlib import import_module

from layerzero import _native

#: Benchmarks that need Python: a module of that name in `layerzero.bench`, with `_` for `-`.
BENCHES = (
    "compile",
    "cpu",
    "graph",
    "graph-ablation",
    "native",
    "out-of-box",
    "overhead",
    "resilience",
    "start",
    "tokenize",
    "tuning",
)


def main() -> int:
    """Runs the command line with this process's arguments and gives its exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHES:
        bench = import_module(f"layerzero.bench.{arguments[1].replace('-', '_')}")
        code: int = bench.main(arguments[2:])
        return code
    if arguments[:1] == ["compat"]:
        from layerzero.compat import command

        return command.main(arguments[1:])
    if arguments[:1] == ["hub"]:
        from layerzero.backends._shared.hub import command as hub

        return hub.main(arguments[1:])
    if arguments[:1] == ["graph"]:
        from layerzero import graph_command

        return graph_command.main(arguments[1:])
    figures = any(argument.partition("=")[0] == "--png" for argument in arguments)
    if arguments[:1] == ["report"] and figures and "--help" not in arguments:
        from layerzero import plots

        return plots.main(arguments)
    return _native.cli(["layerzero", *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
