"""Kernels of the Hugging Face hub: what may be loaded, what is declared, and what is called."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import SM, adapter, takes
from fake_flash_attn import FlashAttention2, FlashAttention3
from row_calls import Rows
from torch import Tensor

BACKENDS = ("hub_activation", "hub_flash_attn2", "hub_flash_attn3", "hub_rmsnorm")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSION = "0+0123456789ab"
TORCH = "".join(torch.__version__.split(".")[:2])
BACKEND = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
#: The variant that was built for what is here.
HERE = f"torch{TORCH}-cxx11-{BACKEND}-{platform.machine()}-{sys.platform}"
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All of them, as if they were there."""
    with ExitStack() as stack:
        for backend in BACKENDS:
            stack.enter_context(described.registered(backend, VERSION))
        yield


def repository(backend: str) -> str:
    """What it is called on the hub."""
    return str(adapter(backend)._repository.name)


class Kernels:
    """The package `kernels` at v0.16: load.py and install.py."""

    def __init__(self, cache: Path, **modules: Any) -> None:
        self.cache = cache
        self.variant = HERE
        self.loaded: list[Path] = []
        self.modules = {repository(name): module for name, module in modules.items()}
        self.installs: list[dict[str, Any]] = []

    def install_kernel(
        self,
        repo_id: str,
        *,
        revision: str,
        local_files_only: bool = False,
        backend: str | None = None,
        user_agent: str | dict[str, str] | None = None,
        validate_dependencies: bool = False,
    ) -> Path:
        self.installs.append(dict(locals()))
        assert local_files_only, "nothing may be downloaded"
        if repo_id not in self.modules or revision != COMMIT:
            raise FileNotFoundError(f"Cannot find a local snapshot for {repo_id} (revision: {revision}).")
        folder = self.cache / repo_id / revision / "build" / self.variant
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(f"# {repo_id}\n")
        (folder / "ops.so").write_bytes(b"\x7fELF" + repo_id.encode())
        return folder

    def get_local_kernel(self, repo_path: Path, backend: str | None = None) -> Any:
        self.loaded.append(repo_path)
        return self.modules["/".join(repo_path.relative_to(self.cache).parts[:2])]


class Activation:
    """kernels-community/activation: torch-ext/activation/__init__.py."""

    @staticmethod
    def gelu(out: Tensor, x: Tensor) -> Tensor:
        assert out.is_contiguous() and x.is_contiguous()
        return out.copy_(torch.nn.functional.gelu(x.float()))

    @staticmethod
    def gelu_tanh(out: Tensor, x: Tensor) -> Tensor:
        assert out.is_contiguous() and x.is_contiguous()
        return out.copy_(torch.nn.functional.gelu(x.float(), approximate="tanh"))


class Norm:
    """kernels-community/rmsnorm: torch-ext/rmsnorm/__init__.py."""

    @staticmethod
    def apply_rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert input.is_contiguous() and input.dtype == weight.dtype
        wide = input.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


def install(monkeypatch: pytest.MonkeyPatch, cache: Path, **modules: Any) -> Kernels:
    """Puts the package in place, with these repositories in its cache, all of which may run and are locked."""
    package = Kernels(cache, **modules)
    module = types.ModuleType("kernels")
    module.__dict__.update(install_kernel=package.install_kernel, get_local_kernel=package.get_local_kernel)
    monkeypatch.setitem(sys.modules, "kernels", module)
    monkeypatch.setattr(metadata, "version", lambda _: "0.16.0")
    allow(*(f"{name}@{COMMIT}" for name in package.modules))
    kernels = {
        f"{name}@{COMMIT}": {HERE: hashes(package.install_kernel(name, revision=COMMIT, local_files_only=True))}
        for name in package.modules
    }
    lock(cache, kernels)
    package.installs.clear()
    return package


def allow(*entries: str) -> None:
    """Sets which kernels may run."""
    lz.configure(backends__hub_allow=list(entries))


def lock(cache: Path, kernels: dict[str, dict[str, dict[str, str]]]) -> Path:
    """Writes the lockfile, and says where it is."""
    file = cache / "hub_lock.json"
    file.write_text(json.dumps({"schema_version": 1, "kernels": kernels}))
    lz.configure(backends__hub_lockfile=str(file))
    return file


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files in a folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Takes the settings back."""
    yield
    lz.configure(backends__hub_allow=None, backends__hub_lockfile=None)


# --- what may be loaded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_runs_that_was_not_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str) -> None:
    fakes = {
        "hub_activation": Activation(),
        "hub_rmsnorm": Norm(),
        "hub_flash_attn2": FlashAttention2(),
        "hub_flash_attn3": FlashAttention3(),
    }
    package = install(monkeypatch, tmp_path, **fakes)
    allow()
    with pytest.raises(RuntimeError, match="is not allowed; name it in backends.hub_allow with the commit to use"):
        adapter(backend).detect()
    assert not package.installs
    allow(f"other/one@{COMMIT}", f"{repository(backend)}@{COMMIT}")
    assert adapter(backend).detect() == VERSION
    assert [(call["revision"], call["local_files_only"]) for call in package.installs] == [(COMMIT, True)]


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT[:12], COMMIT.upper(), ""])
def test_a_revision_is_a_whole_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str) -> None:
    package = install(monkeypatch, tmp_path, hub_activation=Activation())
    allow(f"kernels-community/activation@{revision}")
    with pytest.raises(RuntimeError, match="is not owner/name@commit with all 40 digits of the commit"):
        adapter("hub_activation").detect()
    assert not package.installs


def test_what_is_not_in_the_cache_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, hub_activation=Activation())
    allow(f"kernels-community/rmsnorm@{COMMIT}")
    with pytest.raises(RuntimeError, match="cannot be loaded from the cache: Cannot find a local snapshot"):
        adapter("hub_rmsnorm").detect()


def test_a_file_that_is_not_the_one_that_was_locked_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = install(monkeypatch, tmp_path, hub_activation=Activation())
    name = repository("hub_activation")
    folder = package.install_kernel(name, revision=COMMIT, local_files_only=True)
    right = hashes(folder)
    wrong = "0" * 64
    for changed, said in (
        ({**right, "ops.so": wrong}, f"ops.so has SHA-256 {right['ops.so']}, the lockfile .* says {wrong}"),
        ({**right, "more.py": wrong}, f"more.py has SHA-256 not there, the lockfile .* says {wrong}"),
        (
            {"ops.so": right["ops.so"]},
            f"__init__.py has SHA-256 {right['__init__.py']}, the lockfile .* says not there",
        ),
    ):
        lock(tmp_path, {f"{name}@{COMMIT}": {HERE: changed}})
        with pytest.raises(RuntimeError, match=said):
            adapter("hub_activation").detect()
    lock(tmp_path, {f"{name}@{COMMIT}": {"torch00-cpu-x-y": right}})
    with pytest.raises(RuntimeError, match="is not in .*hub_lock.json; look at its files and run 'layerzero hub'"):
        adapter("hub_activation").detect()
    assert not package.loaded, "nothing was imported"
    # Bytecode is Python's, and not read.
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"anything")
    lock(tmp_path, {f"{name}@{COMMIT}": {HERE: right}})
    assert adapter("hub_activation").detect() == VERSION and package.loaded == [folder]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "cannot be read"),
        ('{"schema_version": 2}', "has schema_version 2, not 1"),
        ('{"schema_version": 1, "kernels": {"a/b@c": ["x"]}}', "has no kernels with their files"),
    ],
)
def test_a_lockfile_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, why: str
) -> None:
    install(monkeypatch, tmp_path, hub_activation=Activation())
    (tmp_path / "hub_lock.json").write_text(text)
    with pytest.raises(RuntimeError, match=why):
        adapter("hub_activation").detect()


def test_the_command_writes_the_lockfile_and_checks_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from layerzero.backends._shared.hub import command

    package = install(monkeypatch, tmp_path, hub_activation=Activation(), hub_rmsnorm=Norm())
    file = lock(tmp_path, {})
    assert command.main(["--check"]) == 1 and "is not in" in capsys.readouterr().err
    assert command.main([]) == 0 and str(file) in capsys.readouterr().out
    folder = package.install_kernel(repository("hub_rmsnorm"), revision=COMMIT, local_files_only=True)
    locked = json.loads(file.read_text())["kernels"]
    assert locked[f"{repository('hub_rmsnorm')}@{COMMIT}"] == {HERE: hashes(folder)} and len(locked) == 2
    assert command.main(["--check"]) == 0 and not package.loaded
    allow()
    assert command.main([]) == 2 and "backends.hub_allow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (HERE, None),
        (HERE.replace(f"torch{TORCH}", "torch29"), "torch 2.9"),
        (HERE.replace("cxx11", "cxx98"), "the C\\+\\+ ABI cxx98"),
        (HERE.replace("-cxx11", ""), None),
        (HERE.replace(f"torch{TORCH}-cxx11", "torch-stable-abi210"), None),
        (HERE.replace(f"torch{TORCH}-cxx11", "torch-stable-abi299"), "torch 2.99 or newer"),
        (HERE.replace(BACKEND, "cu118"), "cuda 11.8"),
        (HERE.replace(BACKEND, "rocm63"), "rocm 6.3"),
        (HERE.replace(platform.machine(), "riscv64"), f"riscv64-{sys.platform}"),
        ("torch-universal", None),
        ("torch-xpu", "is for xpu"),
        ("something", "is no variant whose build is known"),
    ],
)
def test_a_variant_for_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str, why: str | None
) -> None:
    package = install(monkeypatch, tmp_path, hub_activation=Activation())
    package.variant = variant
    name = repository("hub_activation")
    folder = package.install_kernel(name, revision=COMMIT, local_files_only=True)
    lock(tmp_path, {f"{name}@{COMMIT}": {variant: hashes(folder)}})
    if why is None:
        assert adapter("hub_activation").detect() == VERSION
        return
    with pytest.raises(RuntimeError, match=why):
        adapter("hub_activation").detect()
    assert not package.loaded


def test_a_later_cuda_of_the_same_major_version_runs_earlier_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.backends._shared.hub import variants

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    name = HERE.replace(BACKEND, "{}")
    assert variants.mismatch(name.format("cu126")) is None and variants.mismatch(name.format("cu128")) is None
    assert "cuda 12.9" in str(variants.mismatch(name.format("cu129")))
    assert "cuda 13.0" in str(variants.mismatch(name.format("cu130")))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, hub_rmsnorm=Activation())
    with pytest.raises(ImportError, match="has no apply_rms_norm"):
        adapter("hub_rmsnorm").detect()
    monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))
    with pytest.raises(ImportError, match="kernels 0.16.0 has no install_kernel, get_local_kernel; install 0.14"):
        adapter("hub_rmsnorm").detect()
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match="kernels cannot be imported"):
        adapter("hub_rmsnorm").detect()


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "device", "kernel_id", "reason"),
    [
        (PLAIN, "t4", "hub.flash_attn2", "[SM_TOO_OLD]"),
        (PLAIN, "a100", "hub.flash_attn2", None),
        (PLAIN, "b200", "hub.flash_attn2", None),
        (PLAIN, "mi300x", "hub.flash_attn2", "[PLATFORM_MISMATCH]"),
        (PLAIN, "a100", "hub.flash_attn3", "[SM_TOO_OLD]"),
        (PLAIN, "h200", "hub.flash_attn3", None),
        (PLAIN, "b200", "hub.flash_attn3", "[SM_TOO_NEW]"),
        (replace(PLAIN, alibi=True), "h100", "hub.flash_attn2", None),
        (replace(PLAIN, alibi=True), "h100", "hub.flash_attn3", "[INPUT_UNSUPPORTED]"),
        (Rows("activation.gelu"), "l40s", "hub.activation.gelu", None),
        (Rows("activation.gelu", approximate="tanh"), "mi300x", "hub.activation.gelu", None),
        (Rows("activation.gelu"), "gaudi3", "hub.activation.gelu", "[PLATFORM_MISMATCH]"),
        (Rows("norm.rms"), "xpu-max1550", "hub.rmsnorm", None),
        (Rows("norm.rms"), "h100", "hub.rmsnorm", "[PLATFORM_MISMATCH]"),
    ],
)
def test_what_is_declared(call: Dense | Rows, device: str, kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device)[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_loads_the_document(backend: str) -> None:
    known = {k.kernel_id for k in lz.list_kernels() if k.backend == backend}
    assert known == set(adapter(backend).KERNELS)


# --- what is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "device"), [(2, "a100"), (3, "h100")])
def test_attention_the_engine_lets_through_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, device: str
) -> None:
    backend, prefix = f"hub_flash_attn{number}", f"hub.flash_attn{number}"
    fake: Any = FlashAttention2(SM[device]) if number == 2 else FlashAttention3(SM[device], returns_tuple=True)
    install(monkeypatch, tmp_path, **{backend: fake})
    assert adapter(backend).detect() == VERSION
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    for call in dense_calls(7, 90, alibi=(False, False, True) if number == 2 else (False,)):
        call = replace(call, alibi=call.alibi and not call.cross)
        for name in takes(call.ask(device), prefix):
            tensors = call.tensors()
            function = adapter(backend).KERNELS[name]
            arguments = call.arguments(function, tensors)
            call.check(function(**arguments), call.contract(tensors))
            plan = function.direct(*arguments.values()) if hasattr(function, "direct") else None
            if plan is not None:
                run, positional, keywords = (*plan, {})[:3]
                call.check(run(*positional, **keywords), call.contract(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {prefix, f"{prefix}.cross"} and min(ran.values()) >= least(5), ran


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    install(monkeypatch, tmp_path, hub_activation=Activation(), hub_rmsnorm=Norm())
    assert adapter("hub_activation").detect() == adapter("hub_rmsnorm").detect() == VERSION
    torch.manual_seed(0)
    for shape in ((4, 64), (2, 3, 40)):
        for approximate in ("none", "tanh"):
            Rows("activation.gelu", shape, dtype, approximate=approximate).run(
                adapter("hub_activation").KERNELS["hub.activation.gelu"]
            )
        Rows("norm.rms", shape, dtype).run(adapter("hub_rmsnorm").KERNELS["hub.rmsnorm"])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2, 3])
def test_the_kernel_itself_is_right(number: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    backend = f"hub_flash_attn{number}"
    try:
        version = adapter(backend).detect()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    ran = 0
    with described.registered(backend, version):
        for call in (
            Dense(seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
            Dense(seq_q=64, seq_k=200, heads=8, kv_heads=2, layout="BHSD", scale=0.2),
            Dense(seq_q=300, seq_k=300, window_left=31),
            Dense(seq_q=96, seq_k=40, cross=True, heads=6, kv_heads=2),
        ):
            tensors = call.tensors("cuda")
            name = f"hub.flash_attn{number}{'.cross' if call.cross else ''}"
            if lz.validate(name, **call.keywords(tensors))[0]:
                call.check(lz.run_kernel(name, **call.keywords(tensors)).cpu(), call.contract(tensors).cpu())
                ran += 1
    assert ran
