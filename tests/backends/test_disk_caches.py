"""Where compilers keep what they made: a folder per library, as the library itself finds it."""

from __future__ import annotations

import tempfile
from getpass import getuser
from pathlib import Path

import pytest
from layerzero import disk_caches

VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_ENABLED",
    "QUACK_CACHE_DIR",
)


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home and a folder for temporary files in which nothing was compiled yet."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert disk_caches.folders() == []


def compiled(folder: Path, name: str = "kernel.so") -> None:
    """What a compiler leaves in its cache, below a folder named after its sources."""
    made = folder / "fingerprint"
    made.mkdir(parents=True, exist_ok=True)
    (made / name).write_bytes(b"code")


def test_quack_keeps_its_kernels_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp" / getuser() / "quack_cache"
    before = disk_caches.states()
    compiled(folder)
    assert disk_caches.changed_since(before) == [str(folder)]
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    assert disk_caches.changed_since(before) == []


def test_flash_attention_4_keeps_its_kernels_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp" / getuser() / "flash_attention_cute_dsl_cache"
    before = disk_caches.states()
    compiled(folder)
    assert disk_caches.changed_since(before) == [], "an older process left it; this one keeps nothing"
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    assert disk_caches.changed_since(before) == [str(folder)]


@pytest.mark.parametrize("variable", ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR"])
def test_a_folder_of_ones_own(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    compiled(tmp_path / "mine")
    before = disk_caches.states()
    assert disk_caches.changed_since(before) == []
    compiled(tmp_path / "mine" / "other")
    assert disk_caches.changed_since(before) == [str(tmp_path / "mine")]


def test_what_was_compiled_before_is_held_by_the_backends_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or another size, had it compiled: nothing changes on disk, and it is kept all the same."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert disk_caches.of_backend("triton") == tmp_path / "triton"
    assert disk_caches.holding("triton", disk_caches.states()) == [], "there is no such folder"
    compiled(tmp_path / "triton")
    before = disk_caches.states()
    assert disk_caches.holding("triton", before) == [str(tmp_path / "triton")]
    # Of others it is not known where they keep anything: what changed counts.
    assert disk_caches.of_backend("cudnn") is None and disk_caches.of_backend("plugin") is None
    assert disk_caches.of_backend("flash_attn_4") is None, "it is not told to keep anything"
    assert disk_caches.holding("plugin", before) == []
    compiled(tmp_path / "triton" / "more")
    assert disk_caches.holding("plugin", before) == [str(tmp_path / "triton")]
