"""What a library was built for, as far as its files tell: nothing here imports it, or torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from layerzero.backend_files import described

# How many shared objects of a library are looked into.
_OBJECTS = 32
_CUDA_RUNTIME = re.compile(r"libcudart(?:-[0-9a-f]+)?\.so\.(\d+)")
_HIP_RUNTIME = re.compile(r"libamdhip64(?:-[0-9a-f]+)?\.so\.(\d+)")


@dataclass(frozen=True)
class Build:
    """What something was built for; ``None`` where that is not told."""

    torch: str | None = None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


def folder(library: str) -> Path | None:
    """Where the top-level package of a library is."""
    try:
        spec = find_spec(library.partition(".")[0])
    except (ImportError, ValueError):
        # A module that was put out of the way, or stands in `sys.modules` without a specification.
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else Path(spec.origin).parent if spec.origin else None


def distribution_name(library: str) -> str:
    """What a library is installed as: as the backend that imports it says, else as it is called."""
    return str(described(library).get("distribution") or library.partition(".")[0])


def distribution(library: str) -> metadata.Distribution | None:
    """The installed distribution of a library."""
    try:
        return metadata.distribution(distribution_name(library))
    except (metadata.PackageNotFoundError, ValueError):
        return None


def torch_build() -> Build:
    """The version of torch that would be imported, and what it was built for."""
    place = folder("torch")
    try:
        file = place / "version.py" if place else None
        return _torch_build(file, file.stat().st_mtime_ns) if file else Build()
    except OSError:
        return Build()


@lru_cache(maxsize=8)
def _torch_build(file: Path, changed: int) -> Build:
    text = file.read_text(encoding="utf-8")
    names = ("__version__", "cuda", "hip", "xpu")
    found = (re.search(rf"^{name}\b[^=]*= '([^']+)'", text, re.MULTILINE) for name in names)
    return Build(*(value and value[1] for value in found))


def built_for(library: str) -> Build:
    """The torch, CUDA and ROCm a library says it was built for, or that its shared objects are linked to."""
    place, found = folder(library), distribution(library)
    if place is not None and (build := _noted(place / "cpp_lib.json")) is not None:
        return build
    if found is None:
        return Build()
    label = found.version.partition("+")[2]
    torch = re.search(r"(?:torch|pt)(\d+\.\d+)", label)
    if described(library).get("torch_in_version"):
        torch = re.match(r"(\d+\.\d+)", found.version)
    cuda = re.search(r"cu(\d{2})(\d?)", label)
    rocm = re.search(r"rocm(\d+(?:\.\d+)?)", label)
    named = cuda and (f"{cuda[1]}.{cuda[2]}" if cuda[2] else cuda[1])
    linked = (None, None) if named or rocm else _linked(found)
    return Build(torch and torch[1], named or linked[0], rocm[1] if rocm else linked[1])


def mismatch(library: str) -> str | None:
    """One line where a library was built for another torch, CUDA or ROCm than there is. It is asked of every library before
    that is imported: what was built for another one may crash, or have no operators."""
    here, build = torch_build(), built_for(library)
    if here.torch is None:
        return None
    found = distribution(library)
    version = found.version if found else None
    other = []
    if build.torch is not None and not _fits(library, version, build.torch, here.torch):
        other.append(f"torch {build.torch}")
    if build.cuda is not None and build.cuda.partition(".")[0] != (here.cuda or "").partition(".")[0]:
        other.append(f"CUDA {build.cuda}")
    if build.hip is not None and build.hip.partition(".")[0] != (here.hip or "").partition(".")[0]:
        other.append(f"ROCm {build.hip}")
    if not other:
        return None
    there = f"torch {here.torch} without CUDA"
    if here.cuda or here.hip:
        there = f"torch {here.torch} with {f'CUDA {here.cuda}' if here.cuda else f'ROCm {here.hip}'}"
    return f"{library} {version or ''}".strip() + f" was built for {' and '.join(other)}; there is {there}"


def _fits(library: str, version: str | None, built: str, here: str) -> bool:
    one, other = _numbers(built)[:2], _numbers(here)[:2]
    if one == other:
        return True
    # From this version on, its builds work with every later torch, too.
    stable = described(library).get("stable_since")
    return stable is not None and version is not None and _numbers(version) >= _numbers(stable) and other > one


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _noted(path: Path) -> Build | None:
    """The note xFormers' build leaves: its CUDA is a number, 1208."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))["version"]
        torch, cuda = noted.get("torch"), noted.get("cuda")
        return Build(str(torch) if torch else None, f"{cuda // 100}.{cuda % 100}" if cuda else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _linked(found: metadata.Distribution) -> tuple[str | None, str | None]:
    """The major versions of the CUDA and of the ROCm runtime that the shared objects of a distribution are linked to."""
    objects = [file for file in found.files or () if re.search(r"\.so(\.\d+)*$", file.name)]
    for file in objects[:_OBJECTS]:
        for needed in needs(Path(str(found.locate_file(file)))):
            if match := _CUDA_RUNTIME.match(needed):
                return match[1], None
            if match := _HIP_RUNTIME.match(needed):
                return None, match[1]
    return None, None


def needs(path: Path) -> list[str]:
    """The libraries a shared object (ELF, 64 bits, little-endian) is linked to."""
    try:
        with path.open("rb") as file:

            def read(at: int, count: int) -> bytes:
                file.seek(at)
                return file.read(count)

            return _needs(read(0, 64), read)
    except (OSError, struct.error, ValueError):
        return []


def _needs(header: bytes, read: Callable[[int, int], bytes]) -> list[str]:
    if header[:6] != b"\x7fELF\x02\x01":
        return []
    (at,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    loaded, dynamic = [], b""
    for number in range(count):
        segment = read(at + number * size, 56)
        kind, _, offset, address, _, length, _, _ = struct.unpack("<IIQQQQQQ", segment)
        if kind == 1:
            loaded.append((address, length, offset))
        elif kind == 2:
            dynamic = read(offset, length)
    entries = list(struct.iter_unpack("<qQ", dynamic[: len(dynamic) // 16 * 16]))
    # After the end tag comes padding.
    end = next((i for i, (tag, _) in enumerate(entries) if tag == 0), len(entries))
    values = entries[:end]
    names = next((value for tag, value in values if tag == 5), None)
    length = next((value for tag, value in values if tag == 10), 0)
    if names is None:
        return []
    offset = next((o + names - a for a, n, o in loaded if a <= names < a + n), None)
    table = read(offset, length) if offset is not None else b""
    return [table[value : table.index(b"\0", value)].decode() for tag, value in values if tag == 1]
