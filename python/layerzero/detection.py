"""Which libraries are installed, and in which version, without importing them: for questions that run no kernel."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from layerzero import _native, backend_files
from layerzero.backends import BACKENDS, UNPROVEN
from layerzero.compat import builds, matrix

#: A backend's name, its document, the versions its kernels may require, and why it cannot be used.
Found = tuple[str, str, dict[str, str], tuple[str, str] | None]


def found() -> list[Found] | None:
    """Every backend that comes along, as it is installed here; ``None`` where a plugin is installed, which only tells its
    kernels when it is imported."""
    from importlib.metadata import entry_points

    from layerzero.loading import GROUP

    if tuple(entry_points(group=GROUP)):
        return None
    # Of those that were never run, the ones that could be used: whether they may, the configuration says.
    unproven = (look(name) for name in UNPROVEN)
    return [*(look(name) for name in BACKENDS), *(one for one in unproven if one[3] is None)]


def unproven() -> list[tuple[str, str, list[str], str | None, str]]:
    """What was never run on the hardware it is for: backend, library, kernels (none for all of them), the version that is
    installed, and why it counts as unproven."""
    whole = "never run on its hardware; tried with recording fakes of the library"
    gradients = "gradients were never run on its hardware; tried with recording fakes of the library"
    some = "some kernels were never run on its hardware; tried in an interpreter"
    found = []
    for name in (*BACKENDS, *UNPROVEN):
        document = backend_files.document(name)
        kernels = [
            one["kernel_id"] for of_op in document["ops"].values() for one in of_op if not one.get("proven", True)
        ]
        if name in UNPROVEN or kernels:
            imported = str(document.get("import_name", name))
            torch = builds.torch_build()
            of_torch = torch.torch if _missing(document["platform"], torch) is None else None
            version = of_torch if imported == "torch" else installed(imported)
            of_gradients = all(".train" in kernel for kernel in kernels)
            why = whole if name in UNPROVEN else gradients if of_gradients else some
            found.append((name, str(document.get("library", name)), kernels, version, why))
    return found


def look(name: str) -> Found:
    """A backend that comes along, as it is installed here."""
    torch = builds.torch_build()
    document = backend_files.document(name)
    library = str(document.get("import_name", name))
    versions = {"torch": torch.torch} if torch.torch else {}
    version = torch.torch if library == "torch" else installed(library)
    if version is None:
        return name, backend_files.text(name), versions, ("NOT_INSTALLED", library)
    why = matrix.problem(name)
    if library == "torch":
        missing = _missing(document["platform"], torch)
        why = f"torch {version} was built without {missing}" if missing else why
    else:
        why = why or builds.mismatch(library)
    text = _of_version(backend_files.text(name), version)
    return name, text, {**versions, name: version}, ("BACKEND_IMPORT_FAILED", why) if why else None


def _missing(platform: Any, torch: builds.Build) -> str | None:
    """What torch was not built for and its kernels for a platform need."""
    needs = {"cuda": ("CUDA", torch.cuda), "rocm": ("ROCm", torch.hip), "xpu": ("XPU", torch.xpu)}
    name, build = needs.get(platform, ("", "any")) if isinstance(platform, str) else ("", "any")
    return name if build is None else None


def installed(library: str) -> str | None:
    """The version of an installed library; ``None`` where its package, or the part of it that is used, is not there."""
    place, part = builds.folder(library), library.partition(".")[2]
    if place is None or part and not (place / part.replace(".", "/")).exists():
        return None
    distribution = builds.distribution(library)
    return distribution.version if distribution else None


def is_unlabelled(library: str) -> bool:
    """Whether there is a library without metadata, as a folder of sources: what its version is only an import tells."""
    place, part = builds.folder(library), library.partition(".")[2]
    if place is None or part and not (place / part.replace(".", "/")).exists():
        return False
    # A folder that another distribution put its modules into is not the library of that name.
    inside = place / part.replace(".", "/") if part else place
    return builds.distribution(library) is None and (not inside.is_dir() or (inside / "__init__.py").exists())


def assumed(wanted: list[str]) -> list[Found]:
    """Every backend that comes along, as if its library were installed, for a device that is described.

    ``wanted`` names the libraries to assume, as ``flash_attn`` or ``flash_attn=2.8.1``; when empty, all of them, in the
    newest version a document of theirs names. torch is always assumed. Raises ``ValueError`` for a library that is not
    known.
    """
    documents = {name: backend_files.document(name) for name in (*BACKENDS, *UNPROVEN)}
    given = dict(_given(entry) for entry in wanted)
    libraries = {name: str(document.get("import_name", name)) for name, document in documents.items()}
    called = {alias: library for name, library in libraries.items() for alias in _names(name, library)}
    for entry in given:
        if entry not in called:
            near = get_close_matches(entry, called, 1)
            raise ValueError(f"no library is called '{entry}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    asked = {called[entry]: version for entry, version in given.items()}
    everything: list[Found] = []
    for name in documents:
        library = libraries[name]
        if asked and library not in asked and library != "torch":
            if name in UNPROVEN:
                continue
            everything.append((name, backend_files.text(name), {}, ("NOT_INSTALLED", library)))
            continue
        named = [documents[other] for other in documents if libraries[other] == library]
        # What torch brings along has a version of its own; its kernels go by torch's.
        newest = (
            documents["torch"] if library == "torch" else max(named, key=lambda one: _order(one["backend_version"]))
        )
        version = asked.get(library) or str(newest["backend_version"])
        versions = {name: version} | ({"torch": version} if library == "torch" else {})
        everything.append((name, _of_version(backend_files.text(name), version), versions, None))
    return everything


@lru_cache(maxsize=128)
def _of_version(document: str, version: str) -> str:
    return _native.document(document, version)


def _given(entry: str) -> tuple[str, str | None]:
    library, _, version = entry.partition("=")
    return library.strip(), version.strip() or None


def _names(name: str, library: str) -> tuple[str, ...]:
    """What a library may be called: as a backend of it, as it is imported, as it is installed."""
    return name, library, builds.distribution_name(library)


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
