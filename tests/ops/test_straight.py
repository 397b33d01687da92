"""The straight path: tensors read in place, calls without an adapter."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero import _native, kernels, torch_state
from processes import forked

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    # A kernel with times goes before one without.
    pytest.mark.usefixtures("nothing_measured"),
]


def norm(x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    wide = x.detach().double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


def check(x: torch.Tensor) -> None:
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x).detach().double(), norm(x), rtol=2e-2, atol=2e-2)


def test_tensors_are_read_in_place_with_this_torch() -> None:
    check(torch.randn(4, 8))
    assert _native.status()["tensors_by"] == "fields"


_READ = """
import torch
from layerzero import _native, torch_state
import layerzero as lz
old = torch_state.specimens
def lie():
    made = old()
    made[3].offset += 1
    return made
torch_state.specimens = {how}
x = torch.randn(4, 8)
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
for _ in range(3):
    torch.testing.assert_close(lz.rms_norm(x), expected)
answer(_native.status()["tensors_by"])
"""


@pytest.mark.parametrize("how", ["list", "lie"])
def test_without_knowing_the_fields_the_exchange_api_is_asked(how: str) -> None:
    """No specimens, or one that contradicts."""
    assert forked(_READ.format(how=how)) == "exchange"


@pytest.mark.parametrize(
    "field", ["address", "sizes", "strides", "offset", "dtype", "keys", "holder", "storage", "requires_grad"]
)
def test_every_field_is_looked_for(field: str) -> None:
    """A specimen knows what it says it knows, so that a wrong place would be found out."""
    for specimen in torch_state.specimens():
        tensor = specimen.tensor
        told = {
            "address": tensor._cdata,
            "sizes": tuple(tensor.shape),
            "strides": tensor.stride(),
            "offset": tensor.storage_offset(),
            "dtype": specimen.dtype,
            "keys": torch._C._dispatch_keys(tensor).raw_repr(),
            "holder": tensor.untyped_storage()._cdata if specimen.on_host else 0,
            "storage": tensor.untyped_storage().data_ptr(),
            "requires_grad": tensor.requires_grad,
        }
        assert getattr(specimen, field) == told[field]
    values = {str(getattr(s, field)) for s in torch_state.specimens()}
    assert len(values) > 1, "all the same: any place would do"


def test_tensors_that_change_in_place_are_read_anew() -> None:
    x = torch.randn(4, 8)
    check(x)
    x.resize_(3, 16).normal_()
    check(x)
    x.set_(torch.randn(5, 6))  # type: ignore[call-overload]
    check(x)
    x.data = torch.randn(2, 3, 4, dtype=torch.float64)
    check(x)
    x.t_() if x.dim() == 2 else x.transpose_(0, 1)
    check(x)


@pytest.mark.parametrize("dims", range(1, 8))
def test_any_number_of_dimensions(dims: int) -> None:
    check(torch.randn(*range(1, dims), 8))


def test_kinds_of_tensors() -> None:
    base = torch.randn(6, 8)
    with torch.inference_mode():
        inference = torch.randn(6, 8)
    kinds = {
        "plain": base,
        "view": base[1:, ::2],
        "offset": torch.randn(100)[3:51].view(6, 8),
        "expanded": torch.randn(8).expand(6, 8),
        "negative": torch.randn(6, 8, dtype=torch.complex64).conj().imag,
        "inference": inference,
        "parameter": torch.nn.Parameter(base),
        "graph": torch.nn.Parameter(base) * 2,
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "double": base.double(),
    }
    for x in kinds.values():
        check(x)
    for x in reversed(kinds.values()):
        check(x)


def test_sparse_and_quantized_tensors_are_refused_after_plain_ones() -> None:
    check(torch.randn(6, 8))
    with pytest.raises(lz.LayerZeroError):
        lz.rms_norm(torch.eye(8).to_sparse())
    with pytest.raises(lz.LayerZeroError):
        lz.rms_norm(torch.quantize_per_tensor(torch.randn(6, 8), 0.1, 0, torch.qint8))


def test_gradients_are_wanted_by_the_call_not_by_the_shape() -> None:
    w = torch.ones(8)
    for wants in (False, True, False, True):
        x = torch.randn(4, 8, requires_grad=wants)
        y = lz.rms_norm(x, w)
        assert y.requires_grad is wants
    with torch.no_grad():
        assert not lz.rms_norm(torch.randn(4, 8, requires_grad=True), w).requires_grad


def test_one_tensor_given_thrice_then_three() -> None:
    """What was planned with one tensor in three places must not put it there again."""
    x = torch.randn(1, 2, 20, 16)
    for q, k, v in [(x, x, x), tuple(torch.randn(3, 1, 2, 20, 16)), (x, torch.randn_like(x), x)] * 2:
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(lz.attention(q, k, v, layout="BHSD").double(), expected, rtol=1e-4, atol=1e-5)


def register(kernel: Any) -> None:
    lz.register_kernel(
        operation="norm.rms", kernel_id="straight.norm", platform="cpu", supported_dtypes=["float32"], priority=100
    )(kernel)


@pytest.fixture
def registered() -> Any:
    yield
    lz.unregister_kernel("straight.norm")


@pytest.mark.usefixtures("registered")
def test_a_planned_call_takes_the_kernels_place() -> None:
    calls: list[tuple[Any, ...]] = []

    def short(x: torch.Tensor, eps: float, *, twice: bool) -> torch.Tensor:
        calls.append(("short", eps, twice))
        return x * 2

    @kernels.direct(lambda input, weight, eps: (short, (input, eps), {"twice": True}) if weight is None else None)
    def kernel(input: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        calls.append(("kernel", eps))
        return input * 2

    register(kernel)
    for i in range(4):
        x = torch.full((3, 4), float(i))
        assert torch.equal(lz.rms_norm(x, eps=0.5), x * 2)
    assert calls == [("kernel", 0.5)] + [("short", 0.5, True)] * 3
    calls.clear()
    for _ in range(3):
        lz.rms_norm(torch.ones(3, 4), torch.ones(4), eps=0.25)
    assert calls == [("kernel", 0.25)] * 3


@pytest.mark.usefixtures("registered")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("plan", [1.0, "three", (1, 2, 3, 4), (len,), (len, (), 3), (max, tuple(range(25)))])
def test_a_plan_that_makes_no_sense_is_not_used(plan: Any) -> None:
    @kernels.direct(lambda input, eps: plan)
    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        return input * 2

    register(kernel)
    x = torch.ones(3, 4)
    for _ in range(3):
        assert torch.equal(lz.rms_norm(x, eps=0.5), x * 2)


@pytest.mark.usefixtures("registered")
def test_a_planned_call_that_fails_is_followed_by_the_next_kernel() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    @kernels.direct(lambda input, eps: (broken, (input,)))
    def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
        return input * 2

    register(kernel)
    x = torch.randn(3, 4)
    assert torch.equal(lz.rms_norm(x, eps=1e-6), x * 2)
    torch.testing.assert_close(lz.rms_norm(x, eps=1e-6).double(), norm(x), rtol=1e-4, atol=1e-5)
    # In doubt the kernel itself is asked again.
    assert torch.equal(lz.rms_norm(x, eps=1e-6), x * 2)
