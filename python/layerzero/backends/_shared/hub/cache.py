"""Kernels of the Hugging Face hub, out of the local cache.

Nothing is downloaded here. A kernel is used if

- the setting `backends.hub_allow` names its repository with the commit that may run, `owner/name@commit` (branches and
  tags move, so they are refused),
- the `kernels` package finds that commit in its cache,
- its variant was built for this torch, CUDA and machine (:mod:`.variants`),
- and its files are those of the lockfile (:mod:`.lockfile`).

To put one there: ``kernels.install_kernel("kernels-community/activation", revision="<commit>")``, look at its files, and
run ``layerzero hub``.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from layerzero import loading

from ..library import Library
from . import lockfile, variants

_kernels = Library("kernels", "install_kernel", "get_local_kernel", advice="install 0.14 or newer")
SETTING = "backends.hub_allow"
_ENTRY = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")


def allowed() -> dict[str, str]:
    """The commit that may run, by repository; raises `RuntimeError` for an entry that is not one."""
    found = {}
    for entry in loading.setting(SETTING):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise RuntimeError(
                f"{SETTING}: '{entry.strip()}' is not owner/name@commit with all 40 digits of the commit"
            )
        found[match[1]] = match[2]
    return found


def library() -> Library:
    """The `kernels` package; raises `ImportError` where it, or a function, is missing."""
    _kernels.find()
    return _kernels


def variant(package: Any, repository: str, commit: str) -> Path:
    """The folder of a repository's variant in the local cache; raises `RuntimeError` where it is not there, or was built for
    something else."""
    try:
        folder = Path(package.install_kernel(repository, revision=commit, local_files_only=True))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise _unloadable(repository, commit, error) from error
    if (other := variants.mismatch(folder.name)) is not None:
        raise RuntimeError(f"{repository}@{commit}: {other}")
    return folder


class Repository:
    """A repository of the hub, as :class:`~..library.Library` is a library: after :meth:`find` its functions are attributes."""

    def __init__(self, name: str, *functions: str) -> None:
        self.name = name
        self._functions = functions

    def find(self) -> str:
        """The commit that is used, as a version. Raises where it may not be used, or is not in the cache."""
        version, module = load(self.name, self._functions)
        vars(self).update((name, getattr(module, name)) for name in self._functions)
        return version

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.name} was not loaded yet, or {name} is not among what it must have", name=name)


def load(repository: str, functions: tuple[str, ...]) -> tuple[str, ModuleType]:
    """A repository's version and module; raises `RuntimeError` where it may not run or is not in the cache, `ImportError`
    where the `kernels` package or a function is missing."""
    package = library()
    commit = allowed().get(repository)
    if commit is None:
        raise RuntimeError(f"{repository} is not allowed; name it in {SETTING} with the commit to use")
    folder = variant(package, repository, commit)
    lockfile.check(repository, commit, folder)
    try:
        with _compiled_afresh():
            module: ModuleType = package.get_local_kernel(folder)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise _unloadable(repository, commit, error) from error
    missing = [name for name in functions if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{repository}@{commit} has no {', '.join(missing)}")
    return f"0+{commit[:12]}", module


@contextmanager
def _compiled_afresh() -> Iterator[None]:
    """Has Python compile what it imports: bytecode that lies in the cache is not in the lockfile."""
    before = sys.pycache_prefix
    with TemporaryDirectory() as folder:
        sys.pycache_prefix = folder
        try:
            yield
        finally:
            sys.pycache_prefix = before


def _unloadable(repository: str, commit: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"{repository}@{commit} cannot be loaded from the cache: {' '.join(str(error).split())}")
