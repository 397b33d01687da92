"""How torch's state is found out: by whichever call comes first, and without a trace that another thread could see."""

from __future__ import annotations

import pytest
from processes import forked

_FIRST_CALL = """
import torch, layerzero as lz
from layerzero import _native
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {{}}))

x = torch.randn(4, 8)
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
with {surroundings}:
    first = lz.rms_norm(x)
torch.testing.assert_close(first.float(), expected, rtol=2e-2, atol=2e-2)
for _ in range(3):
    torch.testing.assert_close(lz.rms_norm(x), expected)
before = _native.allocations() or 0  # not counted in a release build
for _ in range(10):
    lz.rms_norm(x)
allocated = (_native.allocations() or 0) - before
status = _native.status()
answer([status["torch_state_by"], status["tensors_by"], allocated])
"""


@pytest.mark.parametrize("surroundings", ["torch.autocast('cpu')", "Mode()", "torch.no_grad()"])
def test_a_special_first_call_does_not_cost_the_straight_path(surroundings: str) -> None:
    """What cannot be found out under autocast or a dispatch mode is found out by a later call."""
    assert forked(_FIRST_CALL.format(surroundings=surroundings)) == ["symbols", "fields", 0]


_FIRST_IN_A_TRANSFORM = """
import torch, layerzero as lz
from layerzero import _native

x = torch.randn(4, 8)
expected = torch.autograd.functional.jacobian(lambda x: torch.nn.functional.gelu(x).sum(), x)
torch.testing.assert_close({first}, expected)
for _ in range(3):
    lz.gelu(x)
status = _native.status()
answer([status["torch_state_by"], status["tensors_by"]])
"""


@pytest.mark.parametrize(
    "first",
    [
        "torch.func.grad(lambda x: lz.gelu(x).sum())(x)",
        "torch.vmap(torch.func.grad(lambda x: lz.gelu(x).sum()))(x)",
        "torch.func.vjp(lz.gelu, x)[1](torch.ones(4, 8))[0]",
    ],
)
def test_the_first_call_may_be_inside_of_a_transform(first: str) -> None:
    """New tensors are wrappers there, in whose memory nothing can be searched."""
    assert forked(_FIRST_IN_A_TRANSFORM.format(first=first)) == ["symbols", "fields"]


_PROCESS_WIDE = """
import torch, layerzero as lz
from layerzero import _native
flips = []
def refuse(*args, **kwargs):
    flips.append(args)
torch._C._set_deterministic_algorithms = refuse
torch.use_deterministic_algorithms = refuse
lz.rms_norm(torch.randn(4, 8))
answer([flips, _native.status()["torch_state_by"]])
"""


def test_determinism_is_never_flipped_to_find_out_how_it_is_read() -> None:
    """It belongs to the whole process: other threads would run with it."""
    assert forked(_PROCESS_WIDE) == [[], "symbols"]


_DETERMINISM = """
import torch, layerzero as lz
from layerzero import _native
def register(name, priority, value, **more):
    options = dict(operation="norm.rms", platform="cpu", supported_dtypes=["float32"], priority=priority)
    @lz.register_kernel(kernel_id=f"t.{name}", **options, **more)
    def kernel(input, eps): return torch.full_like(input, value)
lz.configure(verify="off")
register("random", 99, 0.0)
register("exact", 98, 1.0, deterministic=True)
x, told = torch.randn(4, 8), []
for on in [False, True, False, True, True, False]:
    torch.use_deterministic_algorithms(on)
    told += [float(lz.rms_norm(x)[0, 0]) for _ in range(2)]
answer(told)
"""


def test_determinism_is_seen_whenever_it_is_turned_on_and_off() -> None:
    seen = forked(_DETERMINISM)
    assert seen == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
