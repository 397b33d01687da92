"""What a library was built for, read from its files: notes, labels of versions, shared objects."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from pathlib import Path

import pytest
from layerzero.compat import builds


def install(site: Path, name: str, version: str, files: dict[str, bytes], distribution: str | None = None) -> None:
    """A distribution as an installer leaves it, with a package of its name, or of another."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise SystemExit('it must not be imported')")
    for file, data in files.items():
        (site / file).write_bytes(data)
    named = distribution or name
    noted = site / f"{named.replace('-', '_')}-{version}.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {named}\nVersion: {version}\n")
    (noted / "RECORD").write_text("".join(f"{file},,\n" for file in (f"{name}/__init__.py", *files)))
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import from, beside a torch 2.11 for CUDA 13.0."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builds, "torch_build", lambda: builds.Build("2.11.0+cu130", "13.0"))
    return tmp_path


def note(torch: str, cuda: int | None) -> dict[str, bytes]:
    noted = {"version": {"cuda": cuda, "hip": None, "torch": torch, "python": "3.12.0"}, "env": {}}
    return {"xformers/cpp_lib.json": json.dumps(noted).encode()}


@pytest.mark.parametrize(
    ("version", "torch", "cuda", "expected"),
    [
        ("0.0.33", "2.9.0+cu128", 1208, "torch 2.9.0+cu128 and CUDA 12.8"),
        ("0.0.33", "2.9.0+cu130", 1300, "torch 2.9.0+cu130"),
        ("0.0.35", "2.10.0+cu128", 1208, "CUDA 12.8"),
        # From 0.0.34 on a build takes every later torch, but no earlier one.
        ("0.0.35", "2.10.0+cu130", 1300, None),
        ("0.0.35", "2.12.0+cu130", 1300, "torch 2.12.0+cu130"),
        ("0.0.33.post1", "2.11.1+cu130", 1301, None),
        ("0.0.35", "2.10.0+cpu", None, None),
    ],
)
def test_the_note_of_xformers(site: Path, version: str, torch: str, cuda: int | None, expected: str | None) -> None:
    install(site, "xformers", version, note(torch, cuda))
    there = "there is torch 2.11.0+cu130 with CUDA 13.0"
    line = builds.mismatch("xformers")
    assert line == (expected and f"xformers {version} was built for {expected}; {there}")


@pytest.mark.parametrize(
    ("backend", "library", "version", "files", "built_for"),
    [
        ("xformers", "xformers", "0.0.33", note("2.9.0+cu128", 1208), "torch 2.9.0+cu128 and CUDA 12.8"),
        ("apex", "apex", "0.1", {"apex_C.so": b"cuda12"}, "CUDA 12"),
        ("flash_attn", "flash_attn", "2.8.3+cu12torch2.9cxx11abiTRUE", {}, "torch 2.9 and CUDA 12"),
        ("zentorch", "zentorch", "2.14.0.1", {}, "torch 2.14"),
        ("aiter", "aiter", "0.1.20+rocm6.3", {}, "ROCm 6.3"),
        ("torchao", "torchao", "0.18.0+cu126", {}, "CUDA 12.6"),
    ],
)
def test_what_was_built_for_something_else_is_never_imported(
    site: Path, backend: str, library: str, version: str, files: dict[str, bytes], built_for: str
) -> None:
    from layerzero import detection, loading

    linked = {name: elf("libcudart.so.12") if data == b"cuda12" else data for name, data in files.items()}
    install(site, library, version, linked, builds.distribution_name(library))
    line = f"{library} {version} was built for {built_for}; there is torch 2.11.0+cu130 with CUDA 13.0"
    assert detection.look(backend)[3] == ("BACKEND_IMPORT_FAILED", line)
    with pytest.raises(RuntimeError) as caught:
        loading.detect(backend)
    assert str(caught.value) == line
    assert library not in sys.modules


def test_libraries_for_rocm_are_compared_with_torchs(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "labelled", "1.0+rocm6.3", {})
    install(site, "linked", "1.0", {"linked.so": elf("libamdhip64.so.6")})
    assert "was built for ROCm 6; there is torch 2.11.0+cu130 with CUDA 13.0" in str(builds.mismatch("linked"))
    monkeypatch.setattr(builds, "torch_build", lambda: builds.Build("2.11.0+rocm6.4", hip="6.4.43482"))
    assert builds.mismatch("labelled") is None and builds.mismatch("linked") is None
    monkeypatch.setattr(builds, "torch_build", lambda: builds.Build("2.12.0+rocm7.0", hip="7.0.1"))
    assert str(builds.mismatch("labelled")).endswith(
        "was built for ROCm 6.3; there is torch 2.12.0+rocm7.0 with ROCm 7.0.1"
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.8.3+cu12torch2.9cxx11abiTRUE", "torch 2.9 and CUDA 12"),
        ("2.8.3+cu13torch2.11cxx11abiTRUE", None),
        ("1.0+cu126", "CUDA 12.6"),
        ("1.0+pt2.11cu130", None),
        ("1.0+local", None),
    ],
)
def test_the_label_of_a_version(site: Path, version: str, expected: str | None) -> None:
    install(site, "labelled", version, {})
    line = builds.mismatch("labelled")
    assert line is None if expected is None else line is not None and f"was built for {expected};" in line


def elf(*needed: str) -> bytes:
    """A shared object that is nothing but what it is linked to."""
    names, offsets = b"\0", []
    for name in needed:
        offsets.append(len(names))
        names += name.encode() + b"\0"
    base, address = 64 + 2 * 56, 0x10000
    tags = [(1, offset) for offset in offsets]
    length = 16 * (len(tags) + 3)
    tags += [(5, address + base + length), (10, len(names)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    size = base + length + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, size, size, 4096)
    segments += struct.pack("<IIQQQQQQ", 2, 6, base, address + base, address + base, length, length, 8)
    return header + segments + dynamic + names


def test_what_a_shared_object_is_linked_to(site: Path) -> None:
    linked = elf("libc10.so", "libcudart.so.12", "libc.so.6")
    install(site, "linked", "3.1", {"linked_cuda.cpython-312-x86_64-linux-gnu.so": linked})
    assert builds.needs(site / "linked_cuda.cpython-312-x86_64-linux-gnu.so") == [
        "libc10.so",
        "libcudart.so.12",
        "libc.so.6",
    ]
    assert builds.mismatch("linked") == ("linked 3.1 was built for CUDA 12; there is torch 2.11.0+cu130 with CUDA 13.0")
    install(site, "fitting", "3.1", {"fitting.so": elf("libcudart-a1b2c3d4.so.13.0.48")})
    assert builds.mismatch("fitting") is None


@pytest.mark.parametrize("data", [b"", b"\x7fELF", elf("libcudart.so.12")[:150], b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_what_is_no_shared_object_tells_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.so").write_bytes(data)
    assert builds.needs(tmp_path / "x.so") == []


def test_the_torch_that_is_installed_is_read_without_importing_it() -> None:
    import torch

    assert builds.torch_build() == builds.Build(torch.__version__, torch.version.cuda)
