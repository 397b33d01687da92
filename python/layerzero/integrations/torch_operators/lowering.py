"""Calls as part of compiled graphs: torch code where the compiler can fuse it, the chosen kernel elsewhere.

The compiler's first stage records a call as its operator, with the fingerprint of what its kernel is to be chosen by. The
second stage, which traces gradients too, comes here: the kernel is chosen for the sizes at hand, and what is traced from
then on is torch code, or the operator again with its kernel in the place of the fingerprint. Sizes that vary are not fixed
by the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _TorchDispatchModeKey

from layerzero import _native, layouts
from layerzero.integrations.torch_operators import kernel_calls
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT, SEED_TENSOR
from layerzero.integrations.torch_operators.operators import ATTENTION, LOWERING, SELECTED, Operator

if TYPE_CHECKING:
    from layerzero.integrations.torch_operators.choices import Choice

#: Kernels of fused_mlp that compute half-width floats in float32.
_PLAIN_MLP = frozenset(["torch.mlp", "torch.cuda.mlp", "torch.any.mlp", "torch.rocm.mlp"])
#: Kernels that ran once through the engine, which imports their library and proves that they take the call.
_ran: set[str] = set()


def lower(operator: Operator, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What a call becomes: its result, traced as torch code, or `NotImplemented` and the operator's arguments."""
    # What only compilers need is imported when one is at work.
    from layerzero import lowerings
    from layerzero.integrations.torch_operators.choices import choose

    at = operator.place(LOWERING)
    args = operator.fill(args)
    choice, words = choose(operator, args)
    result: Any = NotImplemented
    if choice.how == "torch":
        result, choice = _inlined(operator, args, choice)
    elif choice.how == "kernel":
        result, choice = _traced(operator, args, choice)
    lowerings.note(lowerings.LoweredCall(operator.name, words, choice.how, choice.kernel, choice.why))
    said = f"={choice.kernel}" if choice.how == "kernel" else SELECTED
    return result, (*args[:at], said, *args[at + 1 :])


def wanted(operator: Operator, args: tuple[Any, ...]) -> bool:
    """Whether a call is being compiled, and was not lowered yet."""
    if torch._C._get_dispatch_mode(_TorchDispatchModeKey.FUNCTIONAL) is None:
        return False
    at = operator.place(LOWERING)
    said = args[at] if len(args) > at else None
    if said is None:
        # An exported program; it holds operators until it is compiled ahead of time.
        from torch._inductor.virtualized import V

        return bool(V.aot_compilation)
    return said != SELECTED and not said.startswith("=")


def _inlined(operator: Operator, args: tuple[Any, ...], choice: Choice) -> tuple[Any, Choice]:
    """The result of a call as torch code; `NotImplemented` and why, where torch code does not express it."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from layerzero.integrations.torch_operators.choices import Choice

    values = kernel_calls.named(operator, args)
    code = _code(operator, values, str(choice.kernel))
    if isinstance(code, str):
        return NotImplemented, Choice("operator", choice.kernel, code)
    function, given = code
    try:
        result = function(**given)
    except GuardOnDataDependentSymNode:
        return NotImplemented, Choice("operator", choice.kernel, "a size it depends on is only known at run time")
    return _results(operator, args, result), choice


def _traced(operator: Operator, args: tuple[Any, ...], choice: Choice) -> tuple[Any, Choice]:
    """The result of a kernel whose launches are part of the graph; `NotImplemented` where it is called as it is."""
    from layerzero.integrations.torch_operators.choices import Choice

    trace = kernel_calls.traced_of(str(choice.kernel))
    given = None if trace is None else _given(operator, args, str(choice.kernel))
    if trace is None or given is None:
        return NotImplemented, choice
    try:
        result = trace(**given)
    except Exception as error:  # noqa: BLE001 - the kernel is called as outside of graphs, where it says what is wrong
        said = f"{error}".partition("\n")[0]
        return NotImplemented, Choice("kernel", choice.kernel, f"{choice.why}; its launch cannot be traced: {said}")
    return _results(operator, args, result), Choice("launch", choice.kernel, choice.why)


def _given(operator: Operator, args: tuple[Any, ...], kernel: str) -> dict[str, Any] | None:
    """The arguments of a kernel's function, if it is one and the call has them."""
    function = kernel_calls.function_of(kernel)
    return None if function is None else kernel_calls.arguments(function, kernel_calls.named(operator, args))


def _results(operator: Operator, args: tuple[Any, ...], result: Any) -> Any:
    """The results of a call in the memory order the operator promises."""
    first = heads_first(operator, args)
    many = result if isinstance(result, tuple) else (result,)
    shaped = tuple(as_given(tensor, first) for tensor in many)
    return shaped if len(operator.outputs) > 1 else shaped[0]


def _code(operator: Operator, values: dict[str, Any], kernel: str) -> tuple[Callable[..., Any], dict[str, Any]] | str:
    """The torch code of a kernel and its arguments, or why there is none."""
    from layerzero.integrations.torch_operators import compositions

    name = operator.name
    if name == "embedding" and values["weight"].requires_grad and values["weight"].dtype in _HALF:
        return "its gradient is summed in float32"
    if name in compositions.FUSED:
        return compositions.FUSED[name], values
    if name == "linear":
        return compositions.linear, values
    if name == "fused_mlp":
        return (compositions.fused_mlp if kernel in _PLAIN_MLP else compositions.fused_mlp_wide), values
    if values["dropout_p"] != 0.0 or values.pop(SEED_TENSOR, None) is not None:
        return "what it drops is drawn at every call"
    function = kernel_calls.function_of(kernel)
    given = None if function is None else kernel_calls.arguments(function, {**values, "seed": 0})
    if function is None or given is None:
        return f"{kernel} is no torch code"
    return function, given


_HALF = (torch.float16, torch.bfloat16)


def heads_first(operator: Operator, args: tuple[Any, ...]) -> bool:
    """Whether a call of a compiled graph gives heads before the sequence: its result is then a view of memory in which the
    sequence comes first, as that of torch's own attention is."""
    if operator.name not in ATTENTION:
        return False
    at = operator.place(LOWERING)
    if len(args) <= at or args[at] is None:
        return False
    layout = args[operator.place("layout")] or args[operator.place(DEFAULT_LAYOUT)]
    return (layout or layouts.here(str(operator.layout_setting))) == "BHSD"


def as_given(result: Tensor, heads_first: bool) -> Tensor:
    """A result in the memory order the operator promises."""
    return result.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else result.contiguous()


def run(operator: Operator, kernel: str, args: tuple[Any, ...]) -> Any:
    """Runs the kernel that was chosen while the graph was compiled; one that fails is replaced by selection."""
    values = kernel_calls.named(operator, args)
    function = kernel_calls.function_of(kernel)
    given = None if function is None else kernel_calls.arguments(function, values)
    if function is None or given is None or _captures(args):
        return NotImplemented
    try:
        if kernel in _ran:
            return function(**given)
        result = _native.run_kernel(kernel, **_public(operator, args))
    except Exception:  # noqa: BLE001 - selection falls back, counts the failure and tells
        _ran.discard(kernel)
        return NotImplemented
    _ran.add(kernel)
    return result


def _captures(args: tuple[Any, ...]) -> bool:
    """Whether a CUDA graph is being captured: only the engine knows which kernels may be part of one."""
    on_cuda = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
    return on_cuda and torch.cuda.is_current_stream_capturing()


def _public(operator: Operator, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of the public function."""
    inner = (LOWERING, DEFAULT_LAYOUT, SEED_TENSOR)
    values = {name: value for name, value in operator.values(args).items() if name not in inner}
    window = values.get("window")
    if window is not None:
        values["window"] = window[0] if len(window) == 1 else tuple(window)
    return values


def register(operator: Operator) -> None:
    """Lowers calls that autograd does not see: those of inference mode. Calling it again changes nothing."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    op = getattr(torch.ops.layerzero, operator.name).default

    def functional(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and wanted_below(mode, operator, args):
            with mode:
                result, args = lower(operator, args)
                if result is not NotImplemented:
                    return result
        return mode.__torch_dispatch__(op, (), args, kwargs)

    if FunctionalTensorMode not in op.py_kernels and FunctionalTensorMode not in op.python_key_table:
        op.py_impl(FunctionalTensorMode)(functional)


def wanted_below(mode: Any, operator: Operator, args: tuple[Any, ...]) -> bool:
    """As :func:`wanted`, where the mode has been put aside."""
    with mode:
        return wanted(operator, args)
