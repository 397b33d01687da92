"""Liger, quack and Apex: what is declared, put to the engine; what is called, on functions of the same signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata
from types import ModuleType
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from adapter_cases import TOLERANCES
from described import adapter
from torch import Tensor

VERSIONS = {"liger": "0.8.2", "quack": "0.6.4", "apex": "0.1"}
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF)


def must(holds: bool, why: str) -> None:
    """What a library checks."""
    if not holds:
        raise RuntimeError(why)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """In float64."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.double()


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """In float64."""
    wide = [None if t is None else t.double() for t in (weight, bias)]
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], *wide, eps)


class LigerRMSNormFunction:
    """liger_kernel/ops/rms_norm.py."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> Tensor:
        must(X.is_contiguous() and X.shape[-1] <= 65536, "width")
        must(offset == 0.0 and casting_mode == "gemma" and not in_place and row_mode is None, "rounded twice")
        return rms(X, W, eps).to(X.dtype)


class LigerLayerNormFunction:
    """liger_kernel/ops/layer_norm.py."""

    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        must(X.is_contiguous() and X.shape[-1] <= 65536, "width")
        return layer(X, W, B, eps).to(X.dtype)


class LigerFusedAddRMSNormFunction:
    """liger_kernel/ops/fused_add_rms_norm.py."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        must(offset == 0.0 and casting_mode == "gemma" and not in_place, "rounded twice")
        total = X + R
        return rms(total, W, eps).to(X.dtype), total


class LigerSiLUMulFunction:
    """liger_kernel/ops/swiglu.py."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        must(gate_multiplier == down_multiplier == 1.0 and a.shape[-1] <= 65536, "width")
        return torch.nn.functional.silu(a.float()).to(b.dtype) * b


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """quack/rmsnorm.py."""
    must(x.dim() == 2 and x.dtype in FLOATS and (weight is None or weight.dtype in FLOATS), "Unsupported dtype")
    must(bias is None and out_dtype is None and residual_dtype is None and weight_offset == 0.0, "not asked for")
    must(not store_rstd, "not wanted")
    total = x.double() if residual is None else x.double() + residual.double()
    return rms(total, weight, eps).to(x.dtype), x if residual is None else total.to(residual.dtype), None


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
) -> Tensor:
    """quack/rmsnorm.py."""
    return rms(x, weight, eps).to(x.dtype)


class FusedRMSNormFunction:
    """apex/normalization/fused_layer_norm.py."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: torch.Size, eps: float, memory_efficient: bool = False) -> Tensor:
        must(tuple(normalized_shape) == tuple(input.shape[-1:]), "shape")
        return rms(input, None, eps).to(input.dtype)


class FusedRMSNormAffineFunction:
    """apex/normalization/fused_layer_norm.py."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, normalized_shape: torch.Size, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        must(weight.dtype == input.dtype, "dtype")
        return rms(input, weight, eps).to(input.dtype)


class FusedLayerNormFunction:
    """apex/normalization/fused_layer_norm.py."""

    @staticmethod
    def apply(input: Tensor, normalized_shape: torch.Size, eps: float, memory_efficient: bool = False) -> Tensor:
        return layer(input, None, None, eps).to(input.dtype)


class FusedLayerNormAffineFunction:
    """apex/normalization/fused_layer_norm.py."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: torch.Size,
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        must(weight.dtype == bias.dtype == input.dtype, "dtype")
        return layer(input, weight, bias, eps).to(input.dtype)


MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "liger": {
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": LigerRMSNormFunction},
        "liger_kernel.ops.layer_norm": {"LigerLayerNormFunction": LigerLayerNormFunction},
        "liger_kernel.ops.fused_add_rms_norm": {"LigerFusedAddRMSNormFunction": LigerFusedAddRMSNormFunction},
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": LigerSiLUMulFunction},
    },
    "quack": {"quack.rmsnorm": {"rmsnorm": rmsnorm, "rmsnorm_fwd": rmsnorm_fwd}},
    "apex": {
        "apex.normalization.fused_layer_norm": {
            "FusedRMSNormFunction": FusedRMSNormFunction,
            "FusedRMSNormAffineFunction": FusedRMSNormAffineFunction,
            "FusedLayerNormFunction": FusedLayerNormFunction,
            "FusedLayerNormAffineFunction": FusedLayerNormAffineFunction,
        },
        "fused_layer_norm_cuda": {},
    },
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All of them, as if they were installed."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        yield


def install(monkeypatch: pytest.MonkeyPatch, backend: str, without: str = "") -> None:
    """Puts a library in place and has the adapter find it."""
    monkeypatch.setattr(metadata, "version", lambda _: VERSIONS[backend])
    for name, contents in MODULES[backend].items():
        for depth in range(1, name.count(".") + 1):
            package = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(name)
        module.__dict__.update({key: value for key, value in contents.items() if key != without})
        monkeypatch.setitem(sys.modules, name, module)
    assert adapter(backend).detect() == VERSIONS[backend]


# --- what is declared -------------------------------------------------------------------------------------------------

RMS: dict[str, tuple[int, ...]] = {"input": (8, 4096), "weight": (4096,)}
BARE: dict[str, tuple[int, ...]] = {"input": (8, 4096)}
LAYER: dict[str, tuple[int, ...]] = {**RMS, "bias": (4096,)}
ADD: dict[str, tuple[int, ...]] = {**RMS, "residual": (8, 4096)}
GATED: dict[str, tuple[int, ...]] = {"gate": (8, 14336), "up": (8, 14336)}
WIDE: dict[str, tuple[int, ...]] = {"input": (8, 70000), "weight": (70000,)}
GRAD = ("--requires-grad",)


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "flags", "kernel_id", "reason"),
    [
        ("norm.rms", RMS, "bfloat16", (), "liger.rms_norm", None),
        ("norm.rms", BARE, "bfloat16", GRAD, "liger.rms_norm", None),
        ("norm.rms", RMS, "float64", (), "liger.rms_norm", "[DTYPE_UNSUPPORTED]"),
        ("norm.rms", WIDE, "bfloat16", (), "liger.rms_norm", "[CONSTRAINT_FAILED] hidden"),
        ("norm.layer", LAYER, "bfloat16", (), "liger.layer_norm", None),
        ("norm.layer", LAYER, "float32", GRAD, "liger.layer_norm", None),
        ("norm.layer", LAYER, "bfloat16", GRAD, "liger.layer_norm", "[CONSTRAINT_FAILED] not context.requires_grad"),
        ("norm.layer", RMS, "bfloat16", (), "liger.layer_norm", "["),
        ("norm.fused_add_rms", ADD, "bfloat16", GRAD, "liger.add_rms_norm", None),
        ("norm.fused_add_rms", ADD, "float16", (), "liger.add_rms_norm", "[DTYPE_UNSUPPORTED]"),
        ("activation.silu_mul", GATED, "bfloat16", ("--capturing",), "liger.silu_mul", None),
        ("activation.silu_mul", GATED, "bfloat16", GRAD, "liger.silu_mul", "[AUTOGRAD_UNSUPPORTED]"),
        ("norm.rms", BARE, "float32", (), "quack.rms_norm", None),
        ("norm.rms", RMS, "bfloat16", GRAD, "quack.rms_norm", "[AUTOGRAD_UNSUPPORTED]"),
        ("norm.rms", RMS, "bfloat16", GRAD, "quack.rms_norm.train", None),
        ("norm.rms", RMS, "bfloat16", (), "quack.rms_norm.train", "[CONSTRAINT_FAILED] context.requires_grad"),
        ("norm.rms", {"input": (8, 100)}, "bfloat16", (), "quack.rms_norm", "[CONSTRAINT_FAILED] hidden"),
        ("norm.rms", RMS, "bfloat16", ("--capturing",), "quack.rms_norm", "[CUDA_GRAPH_UNSAFE]"),
        ("norm.fused_add_rms", ADD, "float16", (), "quack.add_rms_norm", None),
        ("norm.rms", RMS, "float16", GRAD, "apex.rms_norm", None),
        ("norm.layer", BARE, "float16", (), "apex.layer_norm", None),
        ("norm.layer", RMS, "float16", (), "apex.layer_norm", "[CONSTRAINT_FAILED] weight.present == bias.present"),
    ],
)
def test_what_is_declared(
    op: str, shapes: Any, dtype: str, flags: tuple[str, ...], kernel_id: str, reason: str | None
) -> None:
    reasons = described.ask(op, "h200", shapes, dtype, *flags)[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_weights_of_another_dtype() -> None:
    answer = described.ask("norm.rms", "h200", RMS, "bfloat16", dtypes={"weight": "float32"})
    assert not answer["liger.rms_norm"] and not answer["quack.rms_norm"]
    assert answer["apex.rms_norm"][0].startswith("[CONSTRAINT_FAILED] not weight.present or weight.dtype == input")


# --- what is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 40)])
def test_calls_are_right(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, r = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    w, b = torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = [t.clone() for t in (x, r, w, b)]
    total = x.double() + r.double()
    gated = torch.nn.functional.silu(x.double()) * r.double()
    kinds: dict[str, tuple[tuple[Any, ...], tuple[Tensor, ...]]] = {
        "add_rms_norm": ((x, r, w, 1e-6), (rms(total, w, 1e-6), total)),
        "layer_norm": ((x, w, b, 1e-5), (layer(x, w, b, 1e-5),)),
        "silu_mul": ((x, r), (gated,)),
        "rms_norm": ((x, w, 1e-6), (rms(x, w, 1e-6),)),
        "rms_norm.train": ((x, w, 1e-6), (rms(x, w, 1e-6),)),
    }
    for backend in VERSIONS:
        install(monkeypatch, backend)
        for name, run in adapter(backend).KERNELS.items():
            arguments, want = kinds[name.partition(".")[2]]
            calls = [(run, arguments)]
            if hasattr(run, "direct"):
                calls.append(run.direct(*arguments))
            for function, given in calls:
                got = function(*given)
                for one, other in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
                    assert one.dtype == dtype and one.shape == x.shape, name
                    allowed = 2 * TOLERANCES[dtype]
                    torch.testing.assert_close(one.double(), other, rtol=allowed, atol=allowed)
    assert all(torch.equal(t, was) for t, was in zip((x, r, w, b), before, strict=True)), "an argument was written to"


def test_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 16)
    for backend in VERSIONS:
        install(monkeypatch, backend)
        run = adapter(backend).KERNELS[f"{backend}.rms_norm"]
        torch.testing.assert_close(run(x, None, 1e-6).double(), rms(x, None, 1e-6), rtol=1e-5, atol=1e-5)
    got = adapter("apex").KERNELS["apex.layer_norm"](x, None, None, 1e-5)
    torch.testing.assert_close(got.double(), layer(x, None, None, 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "without"),
    [("liger", "LigerSiLUMulFunction"), ("quack", "rmsnorm_fwd"), ("apex", "FusedLayerNormFunction")],
)
def test_a_function_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, without: str) -> None:
    with pytest.raises(ImportError, match=without):
        install(monkeypatch, backend, without)


@pytest.mark.parametrize("backend", list(VERSIONS))
def test_a_library_that_is_not_there_is_not_found(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    for name in MODULES[backend]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        adapter(backend).detect()


# --- on a device ------------------------------------------------------------------------------------------------------


def version_of(backend: str) -> str:
    """The version of the library itself, where it is installed."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        return str(adapter(backend).detect())
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", list(VERSIONS))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_library_itself_is_right(backend: str, dtype: torch.dtype) -> None:
    version = version_of(backend)
    torch.manual_seed(0)
    ran = 0
    with described.registered(backend, version):
        for shape in ((1, 4096), (7, 1000), (2, 33, 5120), (64, 128)):
            x, r = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
            w, b = (torch.randn(shape[-1], device="cuda").to(dtype) for _ in range(2))
            total = x.double() + r.double()
            gated = torch.nn.functional.silu(x.double()) * r.double()
            normed = {"input": x, "eps": 1e-6}
            calls: list[tuple[str, dict[str, Any], tuple[Tensor, ...]]] = [
                ("rms_norm", {**normed, "weight": w}, (rms(x, w, 1e-6),)),
                ("rms_norm", normed, (rms(x, None, 1e-6),)),
                ("layer_norm", {**normed, "weight": w, "bias": b}, (layer(x, w, b, 1e-6),)),
                ("add_rms_norm", {**normed, "residual": r, "weight": w}, (rms(total, w, 1e-6), total)),
                ("silu_mul", {"gate": x, "up": r}, (gated,)),
            ]
            for kind, keywords, want in calls:
                name = f"{backend}.{kind}"
                if name not in adapter(backend).KERNELS or not lz.validate(name, **keywords)[0]:
                    continue
                got = lz.run_kernel(name, **keywords)
                for one, other in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
                    allowed = 2 * TOLERANCES[dtype]
                    torch.testing.assert_close(one.double(), other, rtol=allowed, atol=allowed)
                ran += 1
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize("backend", list(VERSIONS))
def test_gradients_of_the_library_itself(backend: str) -> None:
    version = version_of(backend)
    torch.manual_seed(0)
    x, w = (
        torch.randn(33, 1024, device="cuda", requires_grad=True),
        torch.randn(1024, device="cuda", requires_grad=True),
    )
    above = torch.randn(33, 1024, device="cuda")
    want = torch.autograd.grad(rms(x, w, 1e-6), (x, w), above.double())
    kept = above.clone()
    ran = 0
    with described.registered(backend, version):
        for name in (f"{backend}.rms_norm", f"{backend}.rms_norm.train"):
            keywords = {"input": x, "weight": w, "eps": 1e-6}
            if name in adapter(backend).KERNELS and lz.validate(name, **keywords)[0]:
                got = torch.autograd.grad(lz.run_kernel(name, **keywords), (x, w), above)
                for one, other in zip(got, want, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
                assert torch.equal(above, kept), "the gradient was written to"
                ran += 1
    assert ran
