"""Gradients of the operators: a backward computes the forward once more, recorded by autograd, and asks it.

An operator is opaque to torch, so that a graph holds it whole and the kernel is chosen when it runs. Its backward is an
operator too, `<name>_backward`. In eager calls on ordinary tensors none of this takes part: there kernels that support
gradients are recorded as they run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from layerzero import layouts
from layerzero.errors import InvalidCallError, LayerZeroError, UnsupportedDerivativeError
from layerzero.integrations.torch_operators import lowering
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT, SEED_TENSOR
from layerzero.integrations.torch_operators.operators import LOWERING, Operator

Evaluate = Callable[[Operator, tuple[Any, ...]], tuple[Tensor, ...]]

_RECORDING_KEYS = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
    DispatchKey.ADInplaceOrView,
)


@contextmanager
def recording() -> Iterator[None]:
    """Lets autograd record inside of an operator, where torch has turned it off."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _RECORDING_KEYS:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def fresh(results: tuple[Tensor, ...], args: tuple[Any, ...]) -> list[Tensor]:
    """Results as an operator may give them: contiguous, and sharing no memory with its arguments or each other."""
    taken = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
    given = []
    for result in results:
        result = result.contiguous()
        storage = result.untyped_storage()._cdata
        if storage in taken:
            result = result.clone()
            storage = result.untyped_storage()._cdata
        taken.add(storage)
        given.append(result)
    return given


def recorded(
    operator: Operator, evaluate: Evaluate, args: tuple[Any, ...], wanted: list[bool]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Evaluates an operator under autograd: the tensors gradients are wanted for, and the results. To be `recording`."""
    values, inputs = list(args), []
    for place, wants in zip(operator.tensors, wanted, strict=True):
        if wants:
            values[place] = values[place].detach().requires_grad_()
            inputs.append(values[place])
    return inputs, evaluate(operator, tuple(values))


def as_in_backward(operator: Operator, evaluate: Evaluate, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Evaluates an operator with the kernel its backward will use: what one kernel drops, another would not."""
    floats = [isinstance(args[at], Tensor) and args[at].dtype.is_floating_point for at in operator.tensors]
    with recording():
        results = recorded(operator, evaluate, args, floats)[1]
    return tuple(result.detach() for result in results)


def backward_of(operator: Operator, evaluate: Evaluate) -> Callable[..., list[Tensor]]:
    """The implementation of the operator's backward."""
    count = len(operator.outputs)

    def backward(*given: Any) -> list[Tensor]:
        grads, wanted, args = given[:count], given[count], operator.fill(given[count + 1 :])
        with recording():
            inputs, results = recorded(operator, evaluate, args, wanted)
            # A result none of these inputs reaches is not part of the graph.
            reached = [(result, grad) for result, grad in zip(results, grads, strict=True) if result.requires_grad]
            found: tuple[Any, ...] = (None,) * len(inputs)
            if reached:
                outputs, weights = zip(*reached, strict=True)
                found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
        names = (operator.names[at] for at, wants in zip(operator.tensors, wanted, strict=True) if wants)
        for name, grad in zip(names, found, strict=True):
            if grad is None:
                text = f"{operator.name}: the kernel chosen gives no gradient with respect to '{name}'"
                raise LayerZeroError(text, code="NO_GRADIENT", hint="detach it, or see lz.explain for other kernels")
        return fresh(found, (*grads, *args))

    return backward


def fake_backward_of(operator: Operator) -> Callable[..., list[Tensor]]:
    """What the backward gives, for tracing."""
    count = len(operator.outputs)

    def backward(*given: Any) -> list[Tensor]:
        wanted, args = given[count], operator.fill(given[count + 1 :])
        tensors = [args[at] for at, wants in zip(operator.tensors, wanted, strict=True) if wants]
        return [tensor.new_empty(tensor.shape) for tensor in tensors]

    return backward


def autograd_kernel(operator: Operator) -> Callable[..., Any]:
    """What the operator does where autograd is looked after."""
    if not operator.differentiable:
        return _detached(operator)
    op = getattr(torch.ops.layerzero, operator.name).default
    backward = getattr(torch.ops.layerzero, f"{operator.name}_backward").default
    function = _function(operator, op, backward)
    drops, lowers = SEED_TENSOR in operator.names, LOWERING in operator.names

    def kernel(keyset: Any, *args: Any) -> Any:
        if lowers and lowering.wanted(operator, args):
            result, args = lowering.lower(operator, args)
            if result is not NotImplemented:
                return result
        if not _records(args):
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        values = _with_layout(operator, operator.fill(args))
        with enable_single_level_autograd_function():
            return function.apply(keyset, *(_with_seed(operator, values) if drops else values))

    return kernel


def _with_layout(operator: Operator, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that say which default layout is in force, where the call does not say its own: the backward runs later,
    and maybe in another thread."""
    if DEFAULT_LAYOUT not in operator.names or operator.layout_setting is None:
        return values
    at = operator.place(DEFAULT_LAYOUT)
    if values[at] is not None or values[operator.place("layout")] is not None:
        return values
    return (*values[:at], layouts.here(operator.layout_setting), *values[at + 1 :])


def _with_seed(operator: Operator, values: tuple[Any, ...]) -> list[Any]:
    """Arguments whose seed is a tensor, if they drop anything: it is how the backward comes to know it."""
    given = list(values)
    seed, at = given[operator.place("seed")], operator.place(SEED_TENSOR)
    if given[operator.place("dropout_p")] != 0.0 and given[at] is None:
        integer: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
        given[at] = torch.randint(2**62, (), **integer) if seed is None else torch.full((), seed, **integer)
    return given


def backward_autograd_kernel(operator: Operator) -> Callable[..., list[Tensor]]:
    """What the operator's backward does where autograd is looked after: a second derivative is refused."""
    op = getattr(torch.ops.layerzero, f"{operator.name}_backward").default
    function = _function(operator, op, None)

    def kernel(keyset: Any, *args: Any) -> list[Tensor]:
        if not _records(args):
            given: list[Tensor] = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
            return given
        with enable_single_level_autograd_function():
            return list(function.apply(keyset, *args))

    return kernel


def _records(args: tuple[Any, ...]) -> bool:
    """Whether autograd has to know about a call: gradients in reverse, or in forward mode."""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))


def _function(operator: Operator, op: Any, backward_op: Any) -> Any:
    """The node of an operator in autograd's graph.

    It serves one level of functorch's transforms, as torch's own operators do: torch hands an operator one level at a
    time, and `torch.library.register_autograd` refuses all of them.
    """

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        # Levels below this one record for themselves.
        below = torch.set_grad_enabled(torch._C._are_functorch_transforms_active())
        with torch._C._AutoDispatchBelowAutograd(), below:
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if backward_op is not None:
            ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
            ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
            ctx.save_for_backward(*(args[i] for i in ctx.places))
        return tuple(results) if isinstance(results, list) else results

    def backward(ctx: Any, *grads: Any) -> Any:
        if backward_op is None:
            raise UnsupportedDerivativeError(
                f"layerzero.{operator.name} has no second derivative",
                code="NO_SECOND_DERIVATIVE",
                hint="differentiate it once, or write it in torch",
            )
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor
        needs = ctx.needs_input_grad[1:]
        found = iter(backward_op(*grads, [needs[at] for at in operator.tensors], *args))
        return (None, *(next(found) if wants else None for wants in needs))

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedDerivativeError(
            f"layerzero.{operator.name} has no forward-mode derivative",
            code="NO_FORWARD_DERIVATIVE",
            hint="use reverse mode (torch.func.grad, torch.func.vjp), or write it in torch",
        )

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "jvp": staticmethod(jvp)}
    make: Any = type(_SingleLevelFunction)
    return make(f"layerzero_{op._opname}_", (_SingleLevelFunction,), methods)


def _detached(operator: Operator) -> Callable[..., Any]:
    """Ids, codes and what is kept in a cache are data: no gradient goes through them."""
    op = getattr(torch.ops.layerzero, operator.name).default
    updated = [operator.place(name) for name in operator.updates]

    def kernel(keyset: Any, *args: Any) -> Any:
        for at in updated:
            if torch.is_grad_enabled() and args[at].requires_grad:
                name = operator.names[at]
                text = f"{operator.name}: '{name}' requires gradients, which do not flow through an update in place"
                hint = "pass it detached, or make the call under torch.no_grad()"
                raise InvalidCallError(text, code="REQUIRES_GRAD", hint=hint)
        with torch.no_grad():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return kernel
