"""``layerzero hub``: writes the lockfile of the hub kernels that are allowed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from layerzero import loading

from . import cache, lockfile


def main(arguments: Sequence[str]) -> int:
    """Locks the kernels in the local cache that `backends.hub_allow` names; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="layerzero hub",
        description="Writes the SHA-256 of every file of the hub kernels that backends.hub_allow names, as they are in the "
        "local cache. Nothing is downloaded, and nothing is imported from them.",
        epilog="Exit codes: 0 all are locked; 1 one cannot be; 2 wrong usage, or none is allowed.",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say which kernels differ from the lockfile"
    )
    options = parser.parse_args(arguments)
    loading.load()
    allowed = cache.allowed()
    if not allowed:
        print(f"no kernel is allowed; name some in {cache.SETTING}: owner/name@commit", file=sys.stderr)
        return 2
    file, problems = lockfile.path(), 0
    kernels = lockfile.read(file)
    package = cache.library()
    for repository, commit in allowed.items():
        name = f"{repository}@{commit}"
        try:
            folder = cache.variant(package, repository, commit)
            if options.check:
                lockfile.check(repository, commit, folder)
            else:
                kernels.setdefault(name, {})[folder.name] = lockfile.hashes(folder)
            print(f"{name}: {folder.name}, {len(lockfile.hashes(folder))} files")
        except RuntimeError as error:
            problems += 1
            print(error, file=sys.stderr)
    if not options.check:
        lockfile.write(file, kernels)
        print(f"written to {file}")
    return 1 if problems else 0
