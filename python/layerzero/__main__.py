"""``python -m layerzero``: the command line."""

from __future__ import annotations

import sys

from layerzero import _native


def main() -> int:
    """Runs the command line with this process's arguments and gives its exit code."""
    arguments = sys.argv[1:]
    if arguments[:2] == ["bench", "overhead"]:
        from layerzero.bench import overhead

        return overhead.main(arguments[2:])
    if arguments[:2] == ["bench", "resilience"] and "--help" not in arguments:
        from layerzero.bench import resilience

        return resilience.main(arguments[2:])
    return _native.cli(["layerzero", *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
