"""Backends and kernels that were never run on the hardware they are for: used where a setting names them."""

from __future__ import annotations

import json
from pathlib import Path

import described
import layerzero as lz
import processes
import pytest
from layerzero import backend_files, detection
from layerzero.backends import BACKENDS, UNPROVEN

CODE = """
import os, sys
os.environ["LAYERZERO_BACKENDS_UNPROVEN"] = {named!r}
import layerzero as lz
kernels = [k for k in lz.list_kernels() if k.backend == "torchao"]
answer([[k.unavailable for k in kernels], "torchao" in sys.modules])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to import from, in which a torchao is installed that says when it is imported."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise ImportError('it was imported')\n")
    noted = tmp_path / "torchao-0.19.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.19\n")
    (noted / "RECORD").write_text("torchao/__init__.py,,\n")
    return tmp_path


def test_one_that_is_installed_says_how_it_is_used(site: Path) -> None:
    (reasons,), imported = processes.forked(CODE.format(named=""), path=[site])
    assert (
        "was never run on the hardware it is for; to use it, name 'torchao' in the setting backends.unproven"
        in reasons[-1]
    )
    assert not imported


def test_one_that_is_named_is_loaded(site: Path) -> None:
    (reasons,), _ = processes.forked(CODE.format(named="torchao"), path=[site])
    assert not any("never run" in reason for reason in reasons)


def test_one_that_is_not_installed_is_not_there() -> None:
    assert not [kernel for kernel in lz.list_kernels() if kernel.backend in UNPROVEN]
    assert {one[0] for one in detection.unproven() if one[3] is None} >= {"aiter", "habana", "xformers"}


@pytest.mark.parametrize(("name", "nearest"), [("xformer", "xformers"), ("flash_atn", "flash_attn"), ("hubb", "hub")])
def test_a_name_nobody_knows_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(lz.errors.ConfigurationError, match=f"'{name}'.*'{nearest}'"):
        lz.configure(backends__unproven=[name])
    with pytest.raises(lz.errors.ConfigurationError, match=f"backends.unproven.*{name}"):
        lz.configure(backends={"unproven": ["torchao", name]})
    lz.configure(backends__unproven=None)


def test_gradients_of_flash_attention_are_used_by_name() -> None:
    shapes = {name: [1, 64, 4, 64] for name in ("query", "key", "value")}
    version = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0"}
    for backend, kernel in (("flash_attn", "flash_attn.v2.train"), ("flash_attn_3", "flash_attn.v3.train")):
        with described.registered(backend, version[backend]):
            allowed = described.ask("attention", "h100", shapes, "float16", "--requires-grad")
            assert allowed[kernel] == []
        lz.list_kernels()
        lz.register_backend(backend_files.folder(backend) / "capabilities.json", {}, version=version[backend])
        try:
            refused = described.ask("attention", "h100", shapes, "float16", "--requires-grad")
            assert [reason.partition("]")[0] for reason in refused[kernel]] == ["[UNPROVEN"]
            # What was run serves without being named.
            assert described.ask("attention", "h100", shapes, "float16")[kernel.removesuffix(".train")] == []
        finally:
            lz.loading._load_builtin(backend)


def test_doctor_says_what_is_unproven_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["backend"]: one for one in lz.doctor().unproven}
    some = {"flash_attn", "flash_attn_3", "flash_attn_4_pages", "flashinfer_prefill"}
    assert set(UNPROVEN) <= set(found) and set(found) - set(UNPROVEN) == some
    installed = ", ".join(name for name, one in found.items() if one["installed"]) or "none"
    counted = f"unproven backends, off unless you name them: {len(found)}; installed here: {installed}\n"
    assert not any(one["named"] for one in found.values()) and counted in capsys.readouterr().out
    with described.unproven("hub"):
        named = {one["backend"] for one in lz.doctor().unproven if one["named"]}
        assert named == {backend for backend in UNPROVEN if backend.startswith("hub_")}
        report = json.loads(described.command("doctor", "--json"))
        assert {one["backend"] for one in report["unproven"] if one["named"]} == named
    assert not set(BACKENDS) & set(UNPROVEN)
