"""Kernels of the Hugging Face hub, out of the local cache.

Nothing is downloaded here. A repository is used if the environment variable `LAYERZERO_HUB_ALLOW` names it with the commit
that may run, `owner/name@commit`, several with commas between them, and the `kernels` package finds that commit in its
cache. Branches and tags move, so they are refused.

To put one there: ``kernels.install_kernel("kernels-community/activation", revision="<commit>")``.
"""

import os
import re
from importlib import import_module, metadata
from types import ModuleType

VARIABLE = "LAYERZERO_HUB_ALLOW"
_ENTRY = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")


def allowed() -> dict[str, str]:
    """The commit that may run, by repository; raises `RuntimeError` for an entry that is not one."""
    found = {}
    for entry in os.environ.get(VARIABLE, "").split(","):
        if not entry.strip():
            continue
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise RuntimeError(
                f"{VARIABLE}: '{entry.strip()}' is not owner/name@commit with all 40 digits of the commit"
            )
        found[match[1]] = match[2]
    return found


def load(repository: str, functions: tuple[str, ...]) -> tuple[str, ModuleType]:
    """A repository's version and module; raises `RuntimeError` where it may not run or is not in the cache, `ImportError`
    where the `kernels` package or a function is missing."""
    try:
        library = import_module("kernels")
        found = metadata.version("kernels")
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ImportError(f"kernels cannot be imported: {' '.join(str(error).split())}") from error
    missing = [name for name in ("install_kernel", "get_local_kernel") if not hasattr(library, name)]
    if missing:
        raise ImportError(f"kernels {found} has no {', '.join(missing)}; install 0.14 or newer")
    commit = allowed().get(repository)
    if commit is None:
        raise RuntimeError(f"{repository} is not allowed; name it in {VARIABLE} with the commit to use")
    try:
        path = library.install_kernel(repository, revision=commit, local_files_only=True)
        module: ModuleType = library.get_local_kernel(path)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise RuntimeError(f"{repository}@{commit} cannot be loaded from the cache: {why}") from error
    missing = [name for name in functions if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{repository}@{commit} has no {', '.join(missing)}")
    return f"0+{commit[:12]}", module
