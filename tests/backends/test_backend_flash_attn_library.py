"""FlashAttention as it is installed: how each version is found, and the libraries themselves on a GPU."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib import metadata

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, Paged
from described import adapter, fits
from flash_attn_installed import FAKES, MODULES, all_registered, backends, install, kernels


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All three, as if they were installed."""
    with all_registered():
        yield


# --- what is found ----------------------------------------------------------------------------------------------------


@backends
def test_the_engine_loads_the_document(backend: str) -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == backend}
    assert set(known) == set(adapter(backend).KERNELS)
    assert all(k.platforms == ["cuda"] for k in known.values())


@backends
def test_a_library_that_is_not_there_is_said_so_in_one_line(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(sys.modules, MODULES[backend].partition(".")[0], None)
    with pytest.raises(ImportError) as caught:
        adapter(backend).detect()
    assert "\n" not in str(caught.value)


def test_the_package_of_version_4_is_not_taken_for_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    with pytest.raises(ImportError, match="flash_attn has no flash_attn_func, .*; install flash-attn 2.8"):
        adapter("flash_attn").detect()


@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_3"])
def test_a_wheel_for_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, usable in (("2.8.3+cu12torch2.8cxx11abiTRUE", False), ("3.0.0b1+cu130torch2110cxx11abitrue", True)):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        if usable:
            assert adapter(backend).detect() == version
        else:
            with pytest.raises(RuntimeError, match="was built for CUDA 12, torch .* for CUDA 13"):
                adapter(backend).detect()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU = [
    Dense(seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(seq_q=64, seq_k=200, heads=8, kv_heads=2, layout="BHSD", scale=0.2),
    Dense(seq_q=200, seq_k=64, heads=4, kv_heads=4, causal=False),
    Dense(seq_q=1, seq_k=333, heads=8, kv_heads=1, dtype="bfloat16"),
    Dense(seq_q=300, seq_k=300, window_left=31),
    Dense(seq_q=150, seq_k=300, causal=False, window_left=16, window_right=8, layout="BHSD"),
    Dense(seq_q=128, seq_k=256, softcap=5.0, scale=1.0, dtype="bfloat16"),
    Dense(seq_q=70, seq_k=70, alibi=True),
    Dense(seq_q=65, seq_k=90, scale=-0.3),
    Dense(seq_q=65, seq_k=90, scale=0.0),
    Dense(seq_q=96, seq_k=40, cross=True, heads=6, kv_heads=2),
    Dense(seq_q=66, seq_k=66, head_dim=256, v_dim=256),
]
PAGED_ON_GPU = [
    Paged(lengths=(5, 700, 0, 256), rows=(1, 1, 1, 1), heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Paged(lengths=(33, 511), rows=(1, 1), heads=4, kv_heads=4, layout="HND", window_left=100),
    Paged(prefill=True, lengths=(5, 700, 0, 256), rows=(5, 100, 2, 256), lead=1, tail=2, heads=8, kv_heads=2),
    Paged(prefill=True, lengths=(64, 300), rows=(64, 30), block_size=16, heads=4, kv_heads=4, window_left=20),
]


@pytest.fixture
def found(backend: str) -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    with described.library_itself(backend) as version:
        yield version


@pytest.mark.gpu
@backends
def test_the_library_itself_is_right(found: str, backend: str) -> None:
    torch.manual_seed(0)
    ran: list[str] = []
    for call in [*ON_GPU, *PAGED_ON_GPU]:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        for name in (n for n in kernels(backend) if "train" not in n):
            if fits(name, keywords) and (".cross" in name) is (isinstance(call, Dense) and call.cross):
                want = call.contract(tensors).cpu() if isinstance(call, Dense) else call.expected(tensors)
                call.check(lz.run_kernel(name, **keywords).cpu(), want)
                ran.append(name)
    assert ran


@pytest.mark.gpu
@backends
def test_gradients_of_the_library_itself(found: str, backend: str) -> None:
    torch.manual_seed(0)
    ran: list[str] = []
    for call in [c for c in ON_GPU if not c.alibi and c.seq_q <= c.seq_k]:
        tensors = {name: t.requires_grad_() for name, t in call.tensors("cuda").items()}
        expected = torch.autograd.grad(call.contract(tensors).sum(), list(tensors.values()))
        for name in (n for n in adapter(backend).KERNELS if ".train" in n and ("cross" in n) is call.cross):
            keywords = call.keywords(tensors)
            if lz.validate(name, **keywords)[0]:
                output = lz.run_kernel(name, **keywords)
                got = torch.autograd.grad(output.float().sum(), list(tensors.values()))
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=3e-2)
                ran.append(name)
    assert ran


@pytest.mark.gpu
@backends
def test_signatures_are_those_of_the_library(found: str, backend: str) -> None:
    fake, module = FAKES[backend](), importlib.import_module(MODULES[backend])
    for name in adapter(backend)._FUNCTIONS:
        theirs = inspect.signature(getattr(module, name)).parameters
        ours = inspect.signature(getattr(fake, name)).parameters
        other = [key for key in set(ours) & set(theirs) if theirs[key].default != ours[key].default]
        assert not other, f"{name}: the defaults of {other} are others"
        assert {"q", "softmax_scale", "causal", "window_size", "softcap"} <= set(theirs)
