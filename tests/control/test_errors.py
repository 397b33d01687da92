"""Every error there is can be raised and says what to do; a kernel that fails does not fail the call."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch

X = torch.linspace(-1.0, 1.0, 24).reshape(3, 8)
Q = torch.randn(1, 4, 2, 8)

BASES: dict[type[Exception], tuple[type[Exception], ...]] = {
    lz.LayerZeroError: (Exception,),
    lz.InvalidCallError: (lz.LayerZeroError, ValueError),
    lz.ArgumentTypeError: (lz.InvalidCallError, TypeError),
    lz.UnsupportedTensorError: (lz.LayerZeroError, TypeError),
    lz.NoKernelFoundError: (lz.LayerZeroError, RuntimeError),
    lz.CudaGraphUnsafeError: (lz.NoKernelFoundError,),
    lz.KernelExecutionError: (lz.LayerZeroError, RuntimeError),
    lz.InputModifiedError: (lz.KernelExecutionError,),
    lz.UnsupportedDerivativeError: (lz.LayerZeroError, NotImplementedError),
    lz.UnknownOperationError: (lz.LayerZeroError, LookupError),
    lz.UnknownKernelError: (lz.LayerZeroError, LookupError),
    lz.UnknownTokenizerError: (lz.LayerZeroError, LookupError),
    lz.BadTokenizerError: (lz.LayerZeroError, ValueError),
    lz.ConfigurationError: (lz.LayerZeroError, ValueError),
    lz.CapabilitiesError: (lz.ConfigurationError,),
    lz.UntraceableModelError: (lz.LayerZeroError, RuntimeError),
    lz.ExportError: (lz.LayerZeroError, RuntimeError),
    lz.LayerZeroInternalError: (lz.LayerZeroError, RuntimeError),
}


def normed(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What rms_norm gives, in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


class Kernels:
    """Registers kernels above all others, and takes them away again."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def add(self, function: Callable[..., Any], operation: str = "norm.rms", **capabilities: Any) -> str:
        """Registers a kernel under a name that was never used before, so that its warnings are its own."""
        Kernels.count += 1
        name = f"failing.k{Kernels.count}"
        given = {"platform": "cpu", "supported_dtypes": ["float32"], "priority": 99, **capabilities}
        lz.register_kernel(operation=operation, kernel_id=name, **given)(function)
        self._known.append(name)
        return name

    def clear(self) -> None:
        """Takes all of them away."""
        for name in self._known:
            lz.unregister_kernel(name)
        self._known.clear()

    count = 0


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """Kernels of one test."""
    made = Kernels()
    yield made
    made.clear()


# --- every error ------------------------------------------------------------------------------------------------------


def broken(input: torch.Tensor, eps: float) -> torch.Tensor:
    """A kernel that fails."""
    raise OSError("the library is broken\nand says so at length")


def run_broken(kernels: Kernels) -> Any:
    """Runs it by name, so that no other can help."""
    return lz.run_kernel(kernels.add(broken), X)


def call_spoiling(kernels: Kernels) -> Any:
    """A kernel that changes its input before it fails."""

    def spoiling(input: torch.Tensor, eps: float) -> torch.Tensor:
        input.mul_(2)
        raise RuntimeError("out of breath")

    kernels.add(spoiling)
    return lz.rms_norm(X.clone())


def register_twice(kernels: Kernels) -> None:
    """The same kernel again."""
    name = kernels.add(broken)
    lz.register_kernel(operation="norm.rms", kernel_id=name, platform="cpu", supported_dtypes=["float32"])(broken)


RAISED: dict[type[lz.LayerZeroError], tuple[str, Callable[[Kernels], Any]]] = {
    lz.LayerZeroError: ("VMAP_RANDOMNESS", lambda _: torch.vmap(lambda x: lz.sample_topk(x, 2))(X[:, None])),
    lz.InvalidCallError: ("WRONG_SHAPE", lambda _: lz.rms_norm(X, X[0, :3])),
    lz.ArgumentTypeError: ("NOT_A_TENSOR", lambda _: lz.rms_norm("text")),
    lz.UnsupportedTensorError: ("UNSUPPORTED_TENSOR", lambda _: lz.rms_norm(X.to_sparse())),
    lz.NoKernelFoundError: ("NO_KERNEL_FOUND", lambda _: lz.run_kernel("torch.sdpa.math", Q, Q, Q, softcap=2.0)),
    lz.KernelExecutionError: ("KERNEL_EXECUTION_FAILED", run_broken),
    lz.InputModifiedError: ("INPUT_MODIFIED", call_spoiling),
    lz.UnsupportedDerivativeError: ("NO_FORWARD_DERIVATIVE", lambda _: torch.func.jvp(lz.gelu, (X,), (X,))),
    lz.UnknownOperationError: ("UNKNOWN_OPERATION", lambda _: lz.which("rms_nrm", X)),
    lz.UnknownKernelError: ("UNKNOWN_KERNEL", lambda _: lz.unregister_kernel("nobody.home")),
    lz.UnknownTokenizerError: ("UNKNOWN_TOKENIZER", lambda _: lz.tokenize("a", "/no/such/file")),
    lz.BadTokenizerError: ("BAD_TOKENIZER", lambda _: lz.tokenize("a", __file__)),
    lz.ConfigurationError: ("INVALID_CONFIGURATION", register_twice),
    lz.CapabilitiesError: ("INVALID_CAPABILITIES", lambda k: k.add(broken, max_headdim=3)),
    lz.UntraceableModelError: ("UNTRACEABLE_MODEL", lambda _: lz.dry_run(lambda x: int(x.sum()), X)),
    lz.ExportError: ("NOT_EXPORTABLE", lambda _: lz.compile(lambda x: x if x.sum() > 0 else -x, X)),
}
NOT_RAISED = {
    lz.CudaGraphUnsafeError: "needs a CUDA graph under capture",
    lz.LayerZeroInternalError: "needs a defect of LayerZero's own",
}


def every_error() -> set[type]:
    """The base and everything derived from it, however far."""
    found, todo = set(), [lz.LayerZeroError]
    while todo:
        one = todo.pop()
        found.add(one)
        todo += one.__subclasses__()
    return found


def test_no_error_is_left_out() -> None:
    assert every_error() == set(RAISED) | set(NOT_RAISED) == set(BASES)
    assert not set(RAISED) & set(NOT_RAISED)
    assert all(error.__name__ in lz.__all__ for error in every_error())


@pytest.mark.parametrize("error", BASES, ids=lambda error: error.__name__)
def test_an_error_is_also_what_python_calls_it(error: type[Exception]) -> None:
    assert all(issubclass(error, base) for base in BASES[error])


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_every_error_is_raised_and_says_what_to_do(kernels: Kernels, kind: type[lz.LayerZeroError]) -> None:
    code, call = RAISED[kind]
    with pytest.raises(lz.LayerZeroError) as caught:
        call(kernels)
    error = caught.value
    assert type(error) is kind and error.code == code
    assert re.fullmatch(r"[A-Z][A-Z_]+", error.code)
    assert error.hint and error.message
    assert str(error) == f"[{error.code}] {error.message}\n  hint: {error.hint}"
    assert not re.search(r"\bSome\(|\bOk\(|Str\(|\\n", str(error))
    data = error.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data.items() >= {"type": kind.__name__, "code": code, "message": error.message, "hint": error.hint}.items()


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_can_leave_its_process(kernels: Kernels, kind: type[lz.LayerZeroError], way: Any) -> None:
    with pytest.raises(lz.LayerZeroError) as caught:
        RAISED[kind][1](kernels)
    other = way(caught.value)
    assert type(other) is kind and str(other) == str(caught.value) and other.to_dict() == caught.value.to_dict()


def test_no_kernel_found_has_the_reasons_of_every_candidate() -> None:
    with pytest.raises(lz.NoKernelFoundError) as caught:
        lz.run_kernel("torch.sdpa.math", Q, Q, Q, softcap=2.0, dropout_p=0.5)
    error = caught.value
    assert error.operation == "attention.standard.prefill"
    assert {r.code for r in error.failures["torch.sdpa.math"]} == {"PARAM_UNSUPPORTED"}
    assert {r.fields["param"] for r in error.failures["torch.sdpa.math"]} == {"softcap", "dropout_p"}
    assert all(f"[{r.code}] {r.message}" in str(error) for r in error.failures["torch.sdpa.math"])
    assert [r["code"] for r in error.to_dict()["failures"]["torch.sdpa.math"]] == ["PARAM_UNSUPPORTED"] * 2


def test_a_failed_kernel_is_the_cause(kernels: Kernels) -> None:
    with pytest.raises(lz.KernelExecutionError) as caught:
        run_broken(kernels)
    error = caught.value
    ((name, failure),) = error.failures.items()
    assert error.operation == "norm.rms" and isinstance(failure, OSError) and error.__cause__ is failure
    assert failure.__traceback__ is not None
    assert error.to_dict()["failures"] == {name: "OSError: the library is broken\nand says so at length"}
    assert f"{name}: OSError: the library is broken" in str(error) and "at length" not in str(error)


def test_several_mistakes_of_a_document_are_told_together(kernels: Kernels) -> None:
    with pytest.raises(lz.CapabilitiesError) as caught:
        kernels.add(broken, max_headdim=3, autograd="yes", priority=1000)
    assert all(part in str(caught.value) for part in ("max_head_dim", "autograd", "1000"))


# --- fallback ---------------------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_is_followed_by_the_next(kernels: Kernels) -> None:
    name = kernels.add(broken)
    assert lz.which("rms_norm", X).kernel_id == name
    with pytest.warns(lz.LayerZeroWarning) as told:
        first = lz.rms_norm(X)
    torch.testing.assert_close(first.double(), normed(X), rtol=1e-6, atol=1e-6)
    assert len(told) == 1 and issubclass(lz.LayerZeroWarning, UserWarning)
    text = str(told[0].message)
    assert name in text and "OSError: the library is broken" in text and "torch.rms_norm served the call" in text
    assert told[0].filename == __file__


def test_the_warning_comes_once_per_cause(kernels: Kernels) -> None:
    kernels.add(broken)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in range(1, 3):
            lz.rms_norm(torch.ones(rows, 8))
            lz.rms_norm(torch.ones(rows, 8))
        assert len(told) == 1
        kernels.add(broken, priority=100)
        lz.rms_norm(X)
        assert len(told) == 2


def test_a_warning_that_is_an_error_does_not_lose_the_result(kernels: Kernels) -> None:
    kernels.add(broken)
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.unraisablehook", seen.append)
            got = lz.rms_norm(X)
    torch.testing.assert_close(got.double(), normed(X), rtol=1e-6, atol=1e-6)
    assert [hook.exc_type for hook in seen] == [lz.LayerZeroWarning]


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_a_kernel_that_fails_only_now_and_then(kernels: Kernels) -> None:
    """On the straight path too, where nothing is decided any more, a failure goes to the next kernel."""
    calls: list[int] = []

    def moody(input: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) % 3 == 0:
            raise RuntimeError("not now")
        return normed(input, eps).float()

    kernels.add(moody)
    for _ in range(9):
        torch.testing.assert_close(lz.rms_norm(X).double(), normed(X), rtol=1e-6, atol=1e-6)
    assert len(calls) == 9


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_every_kernel_may_fail_but_the_reference(kernels: Kernels) -> None:
    order: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        def kernel(input: torch.Tensor, eps: float) -> torch.Tensor:
            order.append(name)
            raise RuntimeError(name)

        return kernel

    for name, priority in (("second", 98), ("first", 99), ("third", 97)):
        kernels.add(failing(name), priority=priority)
    torch.testing.assert_close(lz.rms_norm(X).double(), normed(X), rtol=1e-6, atol=1e-6)
    assert order == ["first", "second", "third"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_never_swallowed(kernels: Kernels, raised: type[BaseException]) -> None:
    def interrupted(input: torch.Tensor, eps: float) -> torch.Tensor:
        raise raised

    name = kernels.add(interrupted)
    # The first time, from the straight path, and by name.
    for call in (lambda: lz.rms_norm(X), lambda: lz.rms_norm(X), lambda: lz.run_kernel(name, X)):
        with pytest.raises(raised):
            call()


def test_a_call_that_is_wrong_stays_wrong(kernels: Kernels) -> None:
    """A kernel that finds fault with the call is believed; no other is asked."""

    def strict(input: torch.Tensor, eps: float) -> torch.Tensor:
        raise lz.InvalidCallError("rows must be sorted", code="NOT_SORTED", hint="sort them")

    kernels.add(strict)
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match="rows must be sorted") as caught:
            lz.rms_norm(X)
        assert caught.value.code == "NOT_SORTED"


def test_bad_data_is_the_callers_whoever_finds_it() -> None:
    table, ids = torch.randn(4, 8), torch.tensor([1, 4])
    with pytest.raises(lz.InvalidCallError, match=r"indices.*4"):
        lz.embedding(ids, table)


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_what_a_kernel_has_half_appended_is_written_again(kernels: Kernels) -> None:
    calls: list[int] = []

    def half(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        calls.append(1)
        key_cache.view(-1, 2, 8)[slot_mapping] = key + 1
        raise RuntimeError("out of breath")

    kernels.add(half, "kv_cache.append")
    rows, caches = torch.randn(2, 2, 2, 8), torch.zeros(2, 3, 4, 2, 8)
    for attempt in (1, 2):
        lz.kv_append(*rows, *caches, torch.tensor([1, 5]))
        assert len(calls) == attempt
        for new, cache in zip(rows, caches, strict=True):
            wanted = torch.zeros(12, 2, 8)
            wanted[[1, 5]] = new
            assert torch.equal(cache.view(-1, 2, 8), wanted)


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_pages_a_kernel_has_overwritten_are_put_back(kernels: Kernels) -> None:
    """Page 1 is read and overwritten: without the copy the next kernel would read what the first has spoiled."""
    calls: list[int] = []

    def half(key_cache: torch.Tensor, value_cache: torch.Tensor, moves: torch.Tensor) -> None:
        calls.append(1)
        key_cache[moves[:, 1]] = 7.0
        raise RuntimeError("out of breath")

    kernels.add(half, "kv_cache.compact")
    caches = torch.randn(2, 4, 2, 2, 8)
    for attempt in (1, 2):
        before = caches.clone()
        lz.kv_compact(*caches, torch.tensor([[1, 0], [2, 1]]))
        assert len(calls) == attempt
        assert torch.equal(caches, before[:, [1, 2, 2, 3]])


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_an_out_is_written_by_the_kernel_that_served(kernels: Kernels) -> None:
    kernels.add(broken)
    out = torch.full_like(X, 7.0)
    assert lz.rms_norm(X, out=out) is out
    torch.testing.assert_close(out.double(), normed(X), rtol=1e-6, atol=1e-6)


class Strange(torch.Tensor):
    """A tensor nobody asked for."""


@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: None,
        lambda x: x.sum(),
        lambda x: x.double(),
        lambda x: (x, x),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.complex(x, x),
        lambda x: x.to("meta"),
        lambda x: x.as_subclass(Strange),
        lambda x: torch.nested.nested_tensor(list(x)),
    ],
    ids=["none", "shape", "dtype", "two", "sparse", "csr", "quantized", "complex", "meta", "subclass", "nested"],
)
def test_a_kernel_that_gives_something_else_has_failed(kernels: Kernels, wrong: Callable[..., Any]) -> None:
    def careless(input: torch.Tensor, eps: float) -> Any:
        return wrong(input)

    kernels.add(careless)
    # The first call of a kind, and those that go the short way.
    for _ in range(3):
        got = lz.rms_norm(X)
        assert type(got) is torch.Tensor and got.dtype == X.dtype and got.layout == torch.strided
        torch.testing.assert_close(got.double(), normed(X), rtol=1e-6, atol=1e-6)
