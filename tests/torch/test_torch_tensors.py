# mypy: allow-untyped-calls
"""Tensors and surroundings that are not ordinary: subclasses, dispatch modes, kinds LayerZero refuses."""

from typing import Any, ClassVar, Self

import layerzero as lz
import numpy as np
import pytest
import torch
import torch_references as reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch_cases import BY_ID, EVERY_FUNCTION, Case, as_tuple, assert_right, copied, expected, run


class Overriding(Tensor):
    """Sees functions, and nothing below them."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Writes down what is called."""
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapping(Tensor):
    """Holds another tensor, and has no memory of its own."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls on what is inside."""
        unwrap = lambda value: value.held if isinstance(value, Wrapping) else value
        wrap = lambda value: Wrapping(value) if isinstance(value, Tensor) else value
        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


class Watching(TorchDispatchMode):
    """Writes down every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Writes down what is called."""
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def wrapped(case: Case, wrap: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every tensor wrapped."""
    args, kwargs = copied(case.make(5))
    change = lambda value: wrap(value) if isinstance(value, Tensor) else value
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_a_subclass_that_overrides_functions_sees_the_operator(case: Case) -> None:
    args, kwargs = wrapped(case, lambda tensor: tensor.as_subclass(Overriding))
    Overriding.seen.clear()
    result = case.call(*args, **kwargs)
    assert Overriding.seen == [f"layerzero.{case.function}"]
    assert all(type(tensor) is Overriding for tensor in as_tuple(result))
    given = (*as_tuple(result), *(args[at] for at in case.updates))
    assert_right(tuple(tensor.as_subclass(Tensor) for tensor in given), expected(case))


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_a_subclass_that_holds_another_tensor(case: Case) -> None:
    args, kwargs = wrapped(case, Wrapping)
    result = as_tuple(case.call(*args, **kwargs))
    assert all(type(tensor) is Wrapping for tensor in result)
    given: Any = (*result, *(args[at] for at in case.updates))
    assert_right(tuple(tensor.held for tensor in given), expected(case))


def test_gradients_through_a_subclass() -> None:
    rows = torch.randn(3, 16, requires_grad=True)
    for wrap in (lambda x: x.as_subclass(Overriding), Wrapping):
        leaf: Any = wrap(rows.detach()).requires_grad_()
        lz.gelu(leaf).sum().backward()
        grad = leaf.grad.held if isinstance(leaf.grad, Wrapping) else leaf.grad.as_subclass(Tensor)
        plain = rows.detach().double().requires_grad_()
        reference.gelu(plain).sum().backward()
        torch.testing.assert_close(grad.double(), plain.grad, rtol=1e-4, atol=1e-4)


def test_parameters_are_ordinary() -> None:
    weight = torch.nn.Parameter(torch.randn(16))
    rows = torch.randn(3, 16)
    assert_right((lz.rms_norm(rows, weight),), (reference.rms_norm(rows.double(), weight.detach().double()),))
    buffer = torch.nn.Buffer(torch.randn(16))
    assert_right((lz.rms_norm(rows, buffer),), (reference.rms_norm(rows.double(), buffer.double()),))


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_a_dispatch_mode_sees_the_operator_and_nothing_inside(case: Case) -> None:
    with Watching() as mode:
        args, kwargs = copied(case.make(5))
        mode.seen.clear()
        case.call(*args, **kwargs)
    assert [name for name in mode.seen if "detach" not in name] == [f"layerzero.{case.function}.default"]


def test_results_are_written_where_asked_while_torch_looks_on() -> None:
    rows, out = torch.randn(3, 16), torch.empty(3, 16)
    with Watching():
        assert lz.rms_norm(rows, out=out) is out
        for wrong in (torch.empty(3, 8), torch.empty(3, 16, dtype=torch.float64)):
            with pytest.raises(lz.InvalidCallError, match="'out' does not have the shape and dtype"):
                lz.rms_norm(rows, out=wrong)
    assert_right((out,), (reference.rms_norm(rows.double()),))


def test_arrays_of_numpy_while_torch_looks_on() -> None:
    rows = np.ones((3, 16), dtype=np.float32)
    with Watching() as mode:
        result = lz.rms_norm(rows)
    assert isinstance(result, np.ndarray)
    assert "layerzero.rms_norm.default" in mode.seen
    assert_right((torch.from_numpy(result),), (torch.ones(3, 16),))


def test_a_function_mode_leaves_calls_alone() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        assert_right(run(BY_ID["rms_norm"], lz.rms_norm), expected(BY_ID["rms_norm"]))


def test_a_default_device_leaves_calls_alone() -> None:
    with torch.device("meta"):
        rows = torch.randn(3, 16, device="cpu")
        assert lz.rms_norm(rows).device.type == "cpu"


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_inference_tensors(case: Case) -> None:
    with torch.inference_mode():
        assert_right(run(case, case.call), expected(case))


REFUSED = {
    "sparse_coo": lambda: torch.randn(3, 16).to_sparse(),
    "sparse_csr": lambda: torch.randn(3, 16).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3, 16), 0.1, 0, torch.qint8),
    "mkldnn": lambda: torch.randn(3, 16).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_of_tensors_that_are_refused(kind: str) -> None:
    tensor = REFUSED[kind]()
    with pytest.raises(
        lz.UnsupportedTensorError, match=f"gelu: .*dense, strided tensors; this one is _?{kind.partition(',')[0]}"
    ):
        lz.gelu(tensor)
    with pytest.raises(lz.UnsupportedTensorError):
        lz.silu_mul(torch.randn(3, 16), tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32, torch.int32, torch.bool, torch.uint16])
def test_dtypes_that_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(lz.InvalidCallError, match="gelu: 'input' is"):
        lz.gelu(torch.zeros(3, 16, dtype=dtype))


def test_a_tensor_without_dimensions_is_refused() -> None:
    for tensor in (torch.tensor(1.0), torch.tensor(1.0, device="meta")):
        with pytest.raises(lz.InvalidCallError, match="gelu: 'input' has (rank 0|shape \\[\\])"):
            lz.gelu(tensor)


def test_meta_and_real_tensors_do_not_mix_into_numbers() -> None:
    with pytest.raises(lz.InvalidCallError, match="'weight' is on cpu but 'input' is on meta") as caught:
        lz.rms_norm(torch.empty(3, 16, device="meta"), torch.randn(16))
    assert caught.value.code == "MIXED_DEVICES"


def test_devices_do_not_mix_while_tracing() -> None:
    with FakeTensorMode():
        rows, weight = torch.empty(3, 16), torch.empty(16, device="cuda")
        for function in (lz.rms_norm, torch.ops.layerzero.rms_norm):
            with pytest.raises(lz.InvalidCallError, match="rms_norm: 'weight' is on cuda:0 but 'input' is on cpu"):
                function(rows, weight)


def test_lazily_conjugated_and_negated_views() -> None:
    numbers = torch.randn(3, 16, dtype=torch.complex64)
    negated = numbers.conj().imag
    assert negated.is_neg()
    assert_right((lz.gelu(negated),), (reference.gelu(negated.double()),))


@pytest.mark.parametrize("n", [1, 5])
def test_views_with_odd_strides(n: int) -> None:
    base = torch.randn(2 * n, 3, 16)
    for view in (
        base[::2],
        base.transpose(0, 1),
        base[:, 1:2],
        base[:, :, ::2],
        base.flip(0),
        base[:1].expand(4, 3, 16),
    ):
        assert_right((lz.rms_norm(view),), (reference.rms_norm(view.double()),))
        assert_right((torch.ops.layerzero.rms_norm(view),), (reference.rms_norm(view.double()),))


def test_empty_tensors() -> None:
    for function in (lz.gelu, torch.ops.layerzero.gelu):
        assert function(torch.empty(0, 16)).shape == (0, 16)
