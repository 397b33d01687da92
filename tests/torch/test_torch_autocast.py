# mypy: allow-untyped-calls
"""Autocast: matrix products compute in the lower precision, all else in the dtype it comes in."""

from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero.integrations.torch_operators.torch_ops import call_traced
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import BY_ID, EVERY_FUNCTION, Case, as_tuple, assert_right, copied, expected, run

LOWERED = [
    "attention",
    "attention_lse",
    "cross_attention",
    "varlen_attention",
    "varlen_attention_lse",
    "paged_attention",
    "paged_attention_lse",
    "mla_attention",
    "sparse_attention",
    "linear",
    "linear_packed",
    "linear_quantized",
    "fused_mlp",
]
BOTH = {"function": lambda case: case.call, "operator": lambda case: traced(case)}


def traced(case: Case) -> Any:
    """The call as a graph makes it."""
    return lambda *args, **kwargs: call_traced(case.function, args, kwargs)


@pytest.fixture(params=BOTH)
def of(request: pytest.FixtureRequest) -> Any:
    """What is called: the public function, or the operator."""
    return BOTH[request.param]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOWERED)
def test_matrix_products_are_lowered(name: str, dtype: torch.dtype, of: Any) -> None:
    case = next(case for case in EVERY_FUNCTION if case.function == name)
    with torch.autocast("cpu", dtype=dtype):
        result, *logarithms = run(case, of(case))
    assert result.dtype == dtype
    assert_right((result, *logarithms), expected(case), 0.25 if name == "fused_mlp" else 0.1)


@pytest.mark.parametrize(
    "case", [c for c in EVERY_FUNCTION if c.function not in LOWERED], ids=lambda case: case.function
)
def test_all_else_stays_as_it_is(case: Case, of: Any) -> None:
    with torch.autocast("cpu"):
        assert_right(run(case, of(case)), expected(case))


@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla:UserWarning")
def test_another_devices_autocast_changes_nothing(of: Any) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_right(run(BY_ID["linear"], of(BY_ID["linear"])), expected(BY_ID["linear"]))


def test_a_disabled_region_inside_changes_nothing(of: Any) -> None:
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        assert_right(run(BY_ID["linear"], of(BY_ID["linear"])), expected(BY_ID["linear"]))


def test_lower_precisions_meet_in_the_one_asked_for(of: Any) -> None:
    (rows, weight), _ = BY_ID["linear-plain"].make(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert of(BY_ID["linear-plain"])(rows.half(), weight.bfloat16()).dtype == torch.bfloat16


def test_double_precision_is_never_lowered(of: Any) -> None:
    (rows, weight), _ = BY_ID["linear-plain"].make(5)
    with torch.autocast("cpu"):
        assert of(BY_ID["linear-plain"])(rows.double(), weight.double()).dtype == torch.float64


def test_slopes_keep_their_precision(of: Any) -> None:
    seen: list[torch.dtype] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.layerzero.attention.default:
                seen.extend(arg.dtype for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))

    args, kwargs = BY_ID["attention-alibi"].make(5)
    with Watching(), torch.autocast("cpu"):
        of(BY_ID["attention-alibi"])(*args, **kwargs)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]


def test_kernels_run_without_autocast() -> None:
    # A composition of torch's functions would otherwise be lowered behind selection's back.
    seen: list[bool] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "layerzero":
                seen.append(torch.is_autocast_enabled("cpu"))
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu"), Watching():
        lz.linear(torch.randn(2, 4), torch.randn(3, 4))
        lz.rms_norm(torch.randn(2, 4))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_autocast_is_on_again_after_an_error() -> None:
    with torch.autocast("cpu"):
        with pytest.raises(lz.InvalidCallError):
            lz.linear(torch.randn(2, 4), torch.randn(3, 5))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_come_back_in_the_dtype_of_their_tensor(of: Any) -> None:
    args, _ = copied(BY_ID["linear"].make(5))
    for arg in args:
        arg.requires_grad_()
    with torch.autocast("cpu"):
        result = of(BY_ID["linear"])(*args)
    result.float().sum().backward()
    assert [arg.grad.dtype for arg in args] == [torch.float32] * 3
    exact = [arg.detach().double().requires_grad_() for arg in args]
    as_tuple(BY_ID["linear"].reference(*exact))[0].sum().backward()
    for got, wanted in zip(args, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=0.05, atol=0.05)


def test_a_backward_inside_of_autocast(of: Any) -> None:
    args, _ = copied(BY_ID["linear"].make(5))
    args[0].requires_grad_()
    with torch.autocast("cpu"):
        of(BY_ID["linear"])(*args).float().sum().backward()
    assert args[0].grad.dtype == torch.float32
