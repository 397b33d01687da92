"""Names in locks, rules and preferences: kernels, aliases, backends and libraries; and names that nobody knows.

Which kernels each form of rule means, for every kernel that comes along, is tested in
crates/layerzero/tests/control/names.rs; here is what a Python program and the command line see of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from described import FOLDER, command, registered
from in_force import changed
from layerzero import _native

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")

DOCUMENTS: dict[str, dict[str, Any]] = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("**/capabilities.json"))
}
X = torch.randn(4, 64)
#: Libraries of several backends, by hand, with versions that suit their documents.
INSTALLED = {
    "flash_attn": "2.8.3",
    "flash_attn_3": "3.0.0b1",
    "flashinfer": "0.6.18",
    "flashinfer_prefill": "0.6.18",
    "xformers": "0.0.35",
    "torch_cuda": "2.11.0",
}
LIBRARIES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn", "flashinfer": "flashinfer"} | {
    "flashinfer_prefill": "flashinfer",
    "xformers": "xformers",
    "flash_attn_4": "flash_attn",
    "flash_attn_4_tiles": "flash_attn",
    "flash_attn_4_pages": "flash_attn",
    "torch_cuda": "torch",
    "torch": "torch",
    "torch_any": "torch",
    "torch_rocm": "torch",
    "flash_attn_ck": "flash_attn",
    "flash_attn_triton": "flash_attn",
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    lz.reset()


@pytest.fixture
def on_h100() -> Iterator[None]:
    with ExitStack() as stack:
        for backend, version in INSTALLED.items():
            stack.enter_context(registered(backend, version))
        yield


def decided(*flags: str) -> dict[str, Any]:
    """What is decided about causal attention on an H100."""
    shapes = [word for name in ("query", "key", "value") for word in ("--shape", f"{name}=2x512x16x128")]
    fixed = ["--device", "h100", "--dtype", "float16", "--layout", "BSHD"]
    answer = command("explain", "--json", "--op", "attention.causal", *fixed, *shapes, *flags)
    decision: dict[str, Any] = json.loads(answer)
    return decision


def test_the_list_of_names_is_up_to_date() -> None:
    import names

    assert names.FILE.read_text() == names.text(), "run 'make schemas'"


def test_every_backend_of_a_library_says_so() -> None:
    several = {"flash_attn": 7, "flashinfer": 2, "torch": 4, "hub": 4}
    libraries = [document.get("library", backend) for backend, document in DOCUMENTS.items()]
    for library in set(libraries):
        assert libraries.count(library) == several.get(library, 1), library
    assert {k.library for k in lz.list_kernels() if k.backend == "flashinfer_prefill"} == {"flashinfer"}


@pytest.mark.parametrize("library", ["flash_attn", "flashinfer", "torch", "xformers"])
def test_a_library_is_avoided_by_the_environment_as_a_whole(
    library: str, on_h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {c["kernel_id"]: c["terms"] for c in decided()["candidates"] if c["terms"]}
    monkeypatch.setenv("LAYERZERO_AVOID", library)
    for candidate in decided()["candidates"]:
        if candidate["terms"]:
            points = candidate["terms"]["policy"] - plain[candidate["kernel_id"]]["policy"]
            avoided = LIBRARIES.get(candidate["backend"]) == library
            assert points == (-50 if avoided else 0), candidate["kernel_id"]


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flashinfer", "flashinfer_prefill", "torch"])
def test_a_library_is_denied_on_the_command_line_as_a_whole(name: str, on_h100: None) -> None:
    for candidate in decided("--deny", name)["candidates"]:
        denied = name in (candidate["backend"], LIBRARIES.get(candidate["backend"]))
        says = "POLICY_DENIED" in [reason["code"] for reason in candidate["reasons"]]
        assert says == denied, candidate["kernel_id"]


def test_libraries_for_a_while() -> None:
    assert lz.which("rms_norm", X).kernel_id.startswith("torch.")
    with lz.disabled("torch"):
        report = lz.explain("rms_norm", X)
        assert report.chosen is not None and report.chosen.startswith("lz_cpu.rms_norm")
        out = {c.kernel_id for c in report.candidates if "POLICY_DENIED" in {r.code for r in c.reasons}}
        libraries = {k.kernel_id: k.library for k in lz.list_kernels("rms_norm")}
        assert out == {kernel for kernel, library in libraries.items() if library == "torch"} and len(out) > 5
        with lz.disabled("lz_cpu"), pytest.raises(lz.NoKernelFoundError):
            lz.rms_norm(X)
    with lz.disabled():
        assert lz.which("rms_norm", X).kernel_id == "lz_cpu.ref.norm.rms"
    with lz.prefer("lz_cpu"), lz.avoid("torch"):
        assert lz.which("rms_norm", X).kernel_id.startswith("lz_cpu.rms_norm")


# --- names that nobody knows ------------------------------------------------------------------------------------------


def test_a_name_that_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(lz.ConfigurationError, match="no kernel is called 'no.such.kernel'") as caught:
        lz.force_kernel("attention.causal", "no.such.kernel")
    assert len(str(caught.value).splitlines()) <= 3 and caught.value.hint
    q = torch.randn(1, 8, 2, 16)
    assert lz.attention(q, q, q).shape == q.shape
    with pytest.raises(lz.ConfigurationError, match="did you mean 'torch.rms_norm'"):
        lz.force_kernel("rms_norm", "torch.rms_nrom")
    with pytest.raises(lz.ConfigurationError, match="did you mean 'flashinfer'"):
        lz.configure(prefer_sources=["flashinferr"])
    with pytest.raises(lz.ConfigurationError, match="did you mean 'flash_attn.v3.causal'"):
        lz.configure(rules=[{"operation": "attention", "prefer": "flash_attn.v3.casual"}])
    for block in (lz.prefer, lz.avoid, lz.disabled):
        with pytest.raises(lz.ConfigurationError, match="did you mean 'xformers'"), block("xformer"):
            raise AssertionError
    assert not changed()


def test_what_is_optional_may_be_unknown() -> None:
    before = lz.which("rms_norm", X).kernel_id
    lz.force_kernel("rms_norm", "plugin.rms_norm", optional=True)
    lz.configure(rules=[{"deny_sources": ["plugin_library"], "optional": True}])
    assert lz.which("rms_norm", X).kernel_id == before

    @lz.register_kernel(operation="norm.rms", kernel_id="plugin.rms_norm", platform="cpu", supported_dtypes=["float32"])
    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(input, input.shape[-1:], None, eps)

    try:
        assert lz.which("rms_norm", X).kernel_id == "plugin.rms_norm"
    finally:
        lz.unregister_kernel("plugin.rms_norm")


def test_a_lock_that_denials_leave_nothing_of_is_refused() -> None:
    lz.force_kernel("rms_norm", "torch.rms_norm.composed")
    with pytest.raises(lz.ConfigurationError, match="leaves no kernel for norm.rms"):
        lz.configure(rules=[{"name": "ban", "deny": "torch"}])
    with pytest.raises(lz.ConfigurationError, match="'torch.gelu' does not serve norm.rms"):
        lz.force_kernel("rms_norm", "torch.gelu")
    assert lz.which("rms_norm", X).kernel_id == "torch.rms_norm.composed"


def test_a_typing_error_in_a_file_keeps_the_last_good_configuration(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("locks: {rms_norm: torch.rms_norm.composed}\n")
    lz.load_config(file)
    try:
        file.write_text("locks: {rms_norm: torch.rms_norm.compsed}\n")
        with pytest.raises(lz.ConfigurationError, match="layerzero.yaml:1:.*did you mean 'torch.rms_norm.composed'"):
            lz.reload()
        assert lz.which("rms_norm", X).kernel_id == "torch.rms_norm.composed"
        assert not lz.health().well and not lz.readiness_check()
    finally:
        _native.load_sources()


# --- programs of their own --------------------------------------------------------------------------------------------


def run(tmp_path: Path, config: str, program: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "layerzero.yaml").write_text(config)
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "import layerzero as lz, torch\nx = torch.ones(2, 8)\n" + program]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


OWN = """
@lz.register_kernel(operation="norm.rms", kernel_id="own.rms_norm", platform="cpu", supported_dtypes=["float32"])
def own(input, eps):
    return torch.nn.functional.rms_norm(input, input.shape[-1:], None, eps)
"""


def test_a_file_may_name_a_kernel_that_the_program_registers_later(tmp_path: Path) -> None:
    done = run(tmp_path, "locks: {rms_norm: own.rms_norm}\n", OWN + "print(lz.which('rms_norm', x).kernel_id)")
    assert done.returncode == 0 and done.stdout == "own.rms_norm\n", done.stderr


def test_a_name_that_is_still_unknown_at_the_first_call_is_its_error_until_it_is_put_right(tmp_path: Path) -> None:
    program = """
for _ in range(2):
    try:
        lz.rms_norm(x)
    except lz.ConfigurationError as error:
        print(error.message)
open("layerzero.yaml", "w").write("locks: {rms_norm: own.rms_norm}")
print(lz.which("rms_norm", x).kernel_id)
"""
    done = run(tmp_path, "locks: {rms_norm: own.rms_nrom}\n", OWN + program)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == second and first.endswith("no kernel is called 'own.rms_nrom'; did you mean 'own.rms_norm'?")
    assert third == "own.rms_norm"


def test_what_is_not_installed_is_said_once(tmp_path: Path) -> None:
    config = "prefer_sources: [apex, habana]\nrules: [{deny: aiter}]\n"
    done = run(tmp_path, config, "for _ in range(3):\n    lz.rms_norm(x)\nlz.reload()\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not installed here: apex, habana") == 1 and "aiter" not in done.stderr, done.stderr
