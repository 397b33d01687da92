"""Tensors that are not quite what their memory says, and surroundings that change what torch makes by default."""

from __future__ import annotations

import threading
from collections.abc import Callable

import layerzero as lz
import pytest
import torch

X = torch.linspace(-1.0, 2.0, 24).reshape(3, 8)


def normed(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What rms_norm gives, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


def negated() -> torch.Tensor:
    """A view whose memory holds the opposite: torch negates it when it is read."""
    view = torch.imag(torch.complex(X, -X).conj())
    assert view.is_neg() and torch.equal(view, X)
    return view


class Marked(torch.Tensor):
    """A subclass that adds nothing."""


def inferred() -> torch.Tensor:
    """A tensor made where gradients do not exist."""
    with torch.inference_mode():
        return X.clone()


SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "negated": negated,
    "zero": lambda: torch._efficientzerotensor((3, 8)),
    "inference": inferred,
    "expanded": lambda: X[:1].expand(3, 8),
    "part": lambda: torch.cat([X, X]).as_strided((3, 8), (16, 1), 3),
    "parameter": lambda: torch.nn.Parameter(X.clone(), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(X.clone()),
    "subclass": lambda: X.as_subclass(Marked),
    "shared": lambda: X.clone().share_memory_(),
}


@pytest.mark.parametrize("kernel", ["torch.rms_norm", "torch.rms_norm.composed", "lz_cpu.ref.norm.rms"])
@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "zero"])
def test_every_kernel_reads_what_torch_would(kind: str, kernel: str) -> None:
    x = SPECIAL[kind]()
    torch.testing.assert_close(
        lz.run_kernel(kernel, x).double().as_subclass(torch.Tensor), normed(x), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_call_reads_what_torch_would(kind: str) -> None:
    x = SPECIAL[kind]()
    for _ in range(2):
        torch.testing.assert_close(lz.rms_norm(x).double().as_subclass(torch.Tensor), normed(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["torch.rms_norm", "lz_cpu.ref.norm.rms"])
def test_another_default_device_or_dtype_changes_nothing(kernel: str) -> None:
    before = torch.get_default_dtype()
    with torch.device("meta"):
        got = lz.run_kernel(kernel, X)
        drawn = lz.sample_topk(X, 3, seed=1)
    assert got.device.type == drawn.device.type == "cpu"
    torch.testing.assert_close(got.double(), normed(X), rtol=1e-6, atol=1e-6)
    torch.set_default_dtype(torch.float64)
    try:
        assert lz.run_kernel(kernel, X).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_gradient_mode_is_a_threads_own() -> None:
    parameter = torch.nn.Parameter(X.clone())
    there: list[str] = []

    def refused() -> list[str]:
        return [reason.code for reason in lz.validate("lz_cpu.ref.norm.rms", parameter)[1]]

    with torch.no_grad():
        other = threading.Thread(target=lambda: there.extend(refused()))
        other.start()
        other.join()
        assert refused() == []
    assert there == refused() == ["AUTOGRAD_UNSUPPORTED"]
