"""Intel GPUs: torch and Intel's extension. What is declared, put to the engine; what is called, on functions of the same
signatures."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, attend, dense_calls
from described import adapter, takes
from fake_flash_attn import HALF, must
from row_calls import Rope, Rows
from torch import Tensor

XPU = "xpu-max1550"
VERSIONS = {"torch_xpu": "2.11.0", "ipex_xpu": "2.9.10+xpu"}
FLOATS = (torch.float32, *HALF)
ATTENTION = "ipex.xpu.varlen_attention"
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Both, as if they were installed."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        yield


class Ipex:
    """v2.9.10+xpu: llm/functional/fusions.py, and the operators of csrc/gpu."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def varlen_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        seqlen_q: Tensor,
        seqlen_k: Tensor,
        alibi_slopes: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        pdropout: float,
        softmax_scale: float,
        zero_tensors: bool,
        is_causal: bool,
        return_softmax: bool,
        gen_: torch.Generator | None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = -1.0,
    ) -> None:
        self.calls.append(dict(locals()))
        must(query.dtype in HALF and all(t.is_contiguous() for t in (query, key, value, out)), "must be contiguous")
        must(all(t.dtype == torch.int32 and t.is_contiguous() for t in (seqlen_q, seqlen_k)), "should be int32")
        must(query.shape[-1] * query.element_size() % 128 == 0 and query.shape == out.shape, "128 bytes")
        must(alibi_slopes is None and pdropout == 0.0 and softmax_scale > 0.0, "not used")
        must(isinstance(gen_, torch.Generator) and gen_ is not torch.default_generator, "numbers are drawn")
        ends_q, ends_k = seqlen_q.tolist(), seqlen_k.tolist()
        for b in range(len(ends_q) - 1):
            rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            seq_q, seq_k = rows.stop - rows.start, keys.stop - keys.start
            must((seq_q, seq_k) == (max_seqlen_q, max_seqlen_k), "lengths")
            allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
            q, k, v = (t.transpose(0, 1) for t in (query[rows], key[keys], value[keys]))
            result = attend(q, k, v, allowed.tril() if is_causal else allowed, softmax_scale)
            out[rows] = result.transpose(0, 1).to(out.dtype)

    @staticmethod
    def rms_norm(X: Tensor, normalized_shape: list[int], W: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        must(X.dtype == W.dtype and normalized_shape == [X.shape[-1]], "shape")
        wide = X.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return (wide * factor * W.float()).to(X.dtype), factor

    @staticmethod
    def fast_layer_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor, bias: Tensor, epsilon: float
    ) -> Tensor:
        wide = (t.float() for t in (weight, bias))
        return torch.nn.functional.layer_norm(input.float(), normalized_shape, *wide, epsilon).to(input.dtype)

    def add_rms_norm(
        self,
        add1: Tensor,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        add_back: bool,
    ) -> Tensor:
        must(add_back and bias is None, "the sum is wanted")
        add1.add_(input)
        return self.rms_norm(add1, normalized_shape, weight, epsilon)[0]

    @staticmethod
    def silu_mul(self_: Tensor, other: Tensor, out: Tensor) -> Tensor:
        return out.copy_(torch.nn.functional.silu(self_.float()) * other.float())


@pytest.fixture
def ipex(monkeypatch: pytest.MonkeyPatch) -> Ipex:
    """The extension in its place, beside the torch it was built for."""
    fake = Ipex()
    names = ("intel_extension_for_pytorch", "intel_extension_for_pytorch.llm")
    functional = types.ModuleType("intel_extension_for_pytorch.llm.functional")
    functional.__dict__["varlen_attention"] = fake.varlen_attention
    for module in (*(types.ModuleType(name) for name in names), functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(adapter("ipex_xpu"), "_ops", fake)
    monkeypatch.setattr(metadata, "version", lambda _: VERSIONS["ipex_xpu"])
    monkeypatch.setattr(torch, "__version__", "2.9.1+xpu")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert adapter("ipex_xpu").detect() == VERSIONS["ipex_xpu"]
    return fake


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "device", "kernel_id", "reason"),
    [
        (PLAIN, XPU, ATTENTION, None),
        (PLAIN, XPU, "torch.xpu.sdpa", None),
        (PLAIN, "h100", ATTENTION, "[PLATFORM_MISMATCH] runs on xpu, this is cuda"),
        (PLAIN, "mi300x", "torch.xpu.sdpa", "[PLATFORM_MISMATCH] runs on xpu, this is rocm"),
        (replace(PLAIN, dtype="float32"), XPU, ATTENTION, "[DTYPE_UNSUPPORTED]"),
        (replace(PLAIN, dtype="float32"), XPU, "torch.xpu.sdpa", None),
        (replace(PLAIN, head_dim=96, v_dim=96), XPU, ATTENTION, "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, head_dim=192), XPU, ATTENTION, "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (replace(PLAIN, heads=8, kv_heads=2), XPU, ATTENTION, None),
        (replace(PLAIN, seq_k=256), XPU, ATTENTION, "[CONSTRAINT_FAILED] not causal or seq_q == seq_k"),
        (replace(PLAIN, seq_k=256), XPU, "torch.xpu.sdpa.masked", None),
        (replace(PLAIN, layout="BHSD"), XPU, ATTENTION, None),
        (replace(PLAIN, causal=False, mask="bool"), XPU, ATTENTION, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), XPU, "torch.xpu.sdpa.masked", None),
        (Rows("norm.rms"), XPU, "ipex.xpu.rms_norm", None),
        (Rows("norm.rms", given=()), XPU, "ipex.xpu.rms_norm", "["),
        (Rows("norm.rms", given=()), XPU, "torch.xpu.rms_norm", None),
        (Rows("norm.layer"), XPU, "ipex.xpu.layer_norm", None),
        (Rows("norm.fused_add_rms"), XPU, "ipex.xpu.add_rms_norm", None),
        (Rows("activation.silu_mul"), XPU, "ipex.xpu.silu_mul", None),
        (Rope(), XPU, "torch.xpu.rope", None),
    ],
)
def test_what_is_declared(call: Dense | Rows | Rope, device: str, kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device)[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_gradients_and_determinism() -> None:
    assert PLAIN.ask(XPU, "--requires-grad")[ATTENTION][0].startswith("[AUTOGRAD_UNSUPPORTED]")
    assert not PLAIN.ask(XPU, "--requires-grad")["torch.xpu.sdpa.train"]
    assert PLAIN.ask(XPU, "--deterministic")[ATTENTION][0].startswith("[NON_DETERMINISTIC]")


# --- what is called ---------------------------------------------------------------------------------------------------


def test_calls_the_engine_lets_through_are_right(ipex: Ipex) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    state = torch.random.get_rng_state()
    for call in dense_calls(
        7, 160, layout=("BSHD",), head_dim=(64, 128), window_left=(-1,), window_right=(-1,), softcap=(0.0,)
    ):
        for name in takes(call.ask(XPU), ATTENTION):
            tensors = call.tensors()
            function = adapter("ipex_xpu").KERNELS[name]
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {ATTENTION, f"{ATTENTION}.cross"} and min(ran.values()) >= 5, ran
    torch.random.set_rng_state(state)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_right(ipex: Ipex, dtype: str) -> None:
    torch.manual_seed(0)
    kernels = {
        "norm.rms": "rms_norm",
        "norm.layer": "layer_norm",
        "norm.fused_add_rms": "add_rms_norm",
        "activation.silu_mul": "silu_mul",
    }
    for op, name in kernels.items():
        for shape in ((4, 64), (2, 3, 40)):
            Rows(op, shape, dtype).run(adapter("ipex_xpu").KERNELS[f"ipex.xpu.{name}"])


def test_what_torch_calls_is_right_on_the_cpu_too() -> None:
    torch.manual_seed(0)
    functions = adapter("torch_xpu").KERNELS
    for call in dense_calls(3, 40, softcap=(0.0,), head_dim=(64,)):
        for name in takes(call.ask(XPU), "torch.xpu.sdpa"):
            tensors = call.tensors()
            call.check(functions[name](**call.arguments(functions[name], tensors)), call.contract(tensors))


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", list(VERSIONS))
def test_the_engine_loads_the_document(backend: str) -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == backend}
    assert set(known) == set(adapter(backend).KERNELS)
    assert all(k.platforms == ["xpu"] for k in known.values())


def test_what_is_missing_is_named(ipex: Ipex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    for backend in VERSIONS:
        with pytest.raises(RuntimeError, match="finds no XPU device"):
            adapter(backend).detect()
    monkeypatch.setattr(torch, "__version__", "2.11.0+xpu")
    with pytest.raises(ImportError, match="needs torch of the same minor version, found 2.11.0"):
        adapter("ipex_xpu").detect()
    monkeypatch.setattr(metadata, "version", lambda _: "2.8.0+cpu")
    with pytest.raises(ImportError, match="is built for the CPU"):
        adapter("ipex_xpu").detect()
    monkeypatch.undo()
    with pytest.raises(ImportError, match="is not installed"):
        adapter("ipex_xpu").detect()
