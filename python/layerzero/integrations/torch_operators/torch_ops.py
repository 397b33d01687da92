"""LayerZero's functions as torch operators, `torch.ops.layerzero.<name>`, and as part of traced graphs.

A call on ordinary tensors never comes here. One that torch must see (a tensor that is a subclass, a dispatch mode,
tracing, vmap) becomes a call of the operator; when the operator runs, its kernel is selected as for any call.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero import _native, control, fingerprints, layouts, lifecycle, loading, packing, torch_state
from layerzero.arrays import Quantized
from layerzero.errors import InvalidCallError, UnsupportedTensorError
from layerzero.integrations.torch_operators import autocast, batching, fakes, gradients, lowering
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT, SEED_TENSOR
from layerzero.integrations.torch_operators.operators import LOWERING, OPERATORS, Operator

__all__ = ["call_traced", "register", "register_tracing"]

_LOCK = lifecycle.open_in_forks(threading.Lock())
# torch forgets the operators of a library nobody holds.
_LIBRARY: list[torch.library.Library] = []
_CALLS: dict[str, Callable[..., Any]] = {}
_TRACED: set[str] = set()


def register() -> None:
    """Defines the operators. Calling it again changes nothing."""
    with _LOCK:
        if _LIBRARY:
            return
        library = torch.library.Library("layerzero", "DEF")  # type: ignore[no-untyped-call]
        for operator in OPERATORS.values():
            _define(library, operator)
            _CALLS[operator.name] = _caller(operator)
        _LIBRARY.append(library)


def register_tracing() -> None:
    """Lets torch's compiler trace the public functions, which are native: each becomes a call of its operator."""
    register()
    for function in (_recompiled, _fingerprint, _sdpa):
        torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    with _LOCK:
        for name in OPERATORS:
            if name not in _TRACED:
                torch.compiler.substitute_in_graph(getattr(_native, name))(_CALLS[name])
                if LOWERING in OPERATORS[name].names:
                    lowering.register(OPERATORS[name])
                _TRACED.add(name)


def call_traced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator of a public function, with the function's arguments."""
    register()
    if name not in _CALLS:
        text = f"layerzero.{name} has no torch operator, so torch cannot trace it or see its tensor subclasses"
        hint = "call it on plain tensors outside of tracing"
        raise UnsupportedTensorError(text, hint=hint)
    # A subclass that overrides functions is to see the operator, not these questions.
    with torch._C.DisableTorchFunctionSubclass():
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                _refuse(name, value)
    try:
        return _CALLS[name](*args, **kwargs)
    except AssertionError as error:
        said = str(error)
        if "FakeTensor" not in said and "fake mode" not in said:
            raise
        text = f"{name}: fake tensors and real ones, or fake tensors of two modes, were given in one call"
        hint = "convert all of them with one FakeTensorMode, or create it with allow_non_fake_inputs=True"
        raise InvalidCallError(text, code="MIXED_FAKE_TENSORS", hint=hint) from error


def _refuse(name: str, tensor: Tensor) -> None:
    """Says no to tensors whose elements do not simply lie in memory."""
    if tensor.is_nested:
        kind, hint = "nested", "pad it with torch.nested.to_padded_tensor, or pass its parts one by one"
    elif tensor.layout is not torch.strided:
        kind, hint = f"{tensor.layout}".removeprefix("torch."), "convert it with .to_dense()"
    elif tensor.is_quantized:
        kind, hint = "quantized", "convert it with .dequantize(), or pass its .int_repr() and scales to lz.dequantize"
    else:
        return
    text = f"{name}: LayerZero works on dense, strided tensors; this one is {kind}"
    raise UnsupportedTensorError(text, code="UNSUPPORTED_TENSOR", hint=hint)


def _define(library: Any, operator: Operator) -> None:
    tags = [torch.Tag.needs_exact_strides]
    if operator.draws:
        tags.append(torch.Tag.nondeterministic_seeded)
    name = operator.name
    # Strides decide which kernels are legal, so a compiler must hand tensors over as the program made them.
    library.define(operator.schema, tags=tuple(tags))
    library.impl(name, _implementation(operator), "CompositeExplicitAutograd")
    torch.library.register_fake(f"layerzero::{name}", _fake(operator), lib=library)
    if operator.differentiable:
        backward = f"{name}_backward"
        library.define(operator.backward_schema, tags=torch.Tag.needs_exact_strides)
        library.impl(backward, gradients.backward_of(operator, _evaluate_again), "CompositeExplicitAutograd")
        torch.library.register_fake(f"layerzero::{backward}", gradients.fake_backward_of(operator), lib=library)
        torch.library.register_vmap(f"layerzero::{backward}", batching.backward_vmap_rule(operator), lib=library)
        library.impl(backward, gradients.backward_autograd_kernel(operator), "Autograd", with_keyset=True)
        autocast.register_autocast(library, operator, backward, lowered=False)
    library.impl(name, gradients.autograd_kernel(operator), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"layerzero::{name}", batching.vmap_rule(operator), lib=library)
    autocast.register_autocast(library, operator, name, lowered=name in autocast.LOWERED)
    if operator.updates:
        library.impl(name, _version_kernel(operator), "ADInplaceOrView", with_keyset=True)


def _version_kernel(operator: Operator) -> Callable[..., None]:
    """Tells autograd that tensors it may have saved are about to change."""
    op = getattr(torch.ops.layerzero, operator.name).default
    places = [operator.place(name) for name in operator.updates]

    def kernel(keyset: Any, *args: Any) -> None:
        torch.autograd.graph.increment_version([args[at] for at in places])
        op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return kernel


def _implementation(operator: Operator) -> Callable[..., Any]:
    """What the operator does on tensors that have memory: selection and the kernel."""
    seed = operator.place(SEED_TENSOR) if SEED_TENSOR in operator.names else len(operator.names)

    def run(*args: Any) -> Any:
        if len(args) > seed and args[seed] is not None:
            results = gradients.as_in_backward(operator, _evaluate, operator.fill(args))
        else:
            results = _evaluate(operator, args)
        given = gradients.fresh(results, args)
        if lowering.heads_first(operator, args):
            given = [lowering.as_given(result, True) for result in given]
        return tuple(given) if len(given) > 1 else given[0] if given else None

    return run


def _fake(operator: Operator) -> Callable[..., Any]:
    def give(*args: Any) -> Any:
        given = fakes.fake(operator.name, operator.values(args))
        if lowering.heads_first(operator, args):
            given = tuple(result.new_empty(_turned(result.shape)).transpose(1, 2) for result in given)
        return given if len(given) > 1 else given[0] if given else None

    return give


def _turned(shape: torch.Size) -> tuple[Any, ...]:
    first, second, third, *rest = shape
    return (first, third, second, *rest)


def _evaluate_again(operator: Operator, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """As :func:`_evaluate`, in a backward: with the layout that was in force where the call was made."""
    layout = args[operator.place(DEFAULT_LAYOUT)] if DEFAULT_LAYOUT in operator.names else None
    if layout is None or layout == layouts.here(str(operator.layout_setting)):
        return _evaluate(operator, args)
    with control.layout(layout):
        return _evaluate(operator, args)


def _same_layout(operator: Operator, layout: str) -> None:
    """A graph means what it was compiled to mean, so it refuses to run where the default layout is another."""
    now = layouts.here(str(operator.layout_setting))
    if now == layout:
        return
    control.look_at_layouts()
    text = f"{operator.name}: the graph was compiled where {operator.layout_setting} is {layout}, and runs where it is {now}"
    hint = "pass layout= to the call, call what you compiled inside the same lz.layout block, or compile it again"
    raise InvalidCallError(text, code="LAYOUT_OF_GRAPH", hint=hint)


def _evaluate(operator: Operator, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Runs the kernel selected for these arguments."""
    values = operator.values(args)
    layout, lowered = values.pop(DEFAULT_LAYOUT, None), values.pop(LOWERING, None)
    if layout is not None:
        _same_layout(operator, layout)
    if lowered is not None and lowered.startswith("="):
        result = lowering.run(operator, lowered[1:], args)
        if result is not NotImplemented:
            return result if isinstance(result, tuple) else (result,)
    seed = values.pop(SEED_TENSOR, None)
    if seed is not None:
        values["seed"] = int(seed)
    window = values.get("window")
    if window is not None:
        values["window"] = window[0] if len(window) == 1 else tuple(window)
    if operator.name == "layer_norm":
        return (_layer_norm(values),)
    result = _native.inner(operator.name, **values)
    if operator.name == "quantize" and isinstance(result, Tensor):
        return _with_scales(result, values)
    return result if isinstance(result, tuple) else () if result is None else (result,)


def _layer_norm(values: dict[str, Any]) -> Tensor:
    """A norm over several dimensions is one over all of their elements in a row."""
    sizes = values.pop("normalized_shape", None)
    shape = values["input"].shape
    if sizes is not None:
        if not sizes or tuple(sizes) != tuple(shape[-len(sizes) :]):
            text = f"layer_norm: normalized_shape is {list(sizes)}, the input has shape {list(shape)}"
            raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass the sizes of the input's trailing dimensions")
        values["input"] = values["input"].flatten(-len(sizes))
        for name in ("weight", "bias"):
            weight = values.get(name)
            if weight is None:
                continue
            if tuple(weight.shape) != tuple(sizes):
                text = f"layer_norm: '{name}' has shape {list(weight.shape)}, normalized_shape is {list(sizes)}"
                raise InvalidCallError(text, code="WRONG_SHAPE", hint=f"pass '{name}' in the shape normalized over")
            values[name] = weight.flatten()
    result: Tensor = _native.inner("layer_norm", **values)
    return result.reshape(shape)


def _with_scales(quantized: Tensor, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """An operator gives as many tensors every time, so it also gives the scales it was given."""
    scale: Tensor = values["scale"]
    like = fakes.fake("quantize", values)[1]
    scales = scale[:, None] if scale.dim() == 1 else scale
    return quantized, scales.expand(like.shape).clone(), torch.zeros_like(scales.expand(like.shape), dtype=torch.int32)


def _with_packed(function: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    out = kwargs.pop("out", None)
    result: Tensor = getattr(torch.ops.layerzero, function)(*args, **kwargs)
    return result if out is None else out.copy_(result)


def _caller(operator: Operator) -> Callable[..., Any]:
    """Calls the operator with the arguments of the public function.

    torch's compiler traces this very code, so what it closes over are constants it knows.
    """
    function, op = operator.name, getattr(torch.ops.layerzero, operator.name)
    lists = tuple((operator.place(name), name) for name in ("window", "normalized_shape") if name in operator.names)
    takes_dtype = "dtype" in operator.names
    setting = operator.layout_setting if DEFAULT_LAYOUT in operator.names else None
    lowers = LOWERING in operator.names
    attends = operator.name in ("attention", "cross_attention")
    others = operator.others
    takes_packed = function in packing.FUNCTIONS

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {others.get(name, name): value for name, value in kwargs.items()}
        if takes_packed:
            given = packing.unwrapped_call(args, kwargs)
            if given is not None:
                return _with_packed(*given)
        if kwargs.pop("return_lse", None):
            # It has fewer arguments: those that say nothing are left out.
            told = {n: v for n, v in kwargs.items() if not (v is None or (isinstance(v, float) and v == 0.0))}
            return getattr(torch.ops.layerzero, f"{function}_lse")(*args, **_lists(told))
        out = kwargs.pop("out", None)
        for at, name in lists:
            if name in kwargs:
                kwargs[name] = _as_list(kwargs[name])
            elif len(args) > at:
                args = (*args[:at], _as_list(args[at]), *args[at + 1 :])
        if takes_dtype:
            args = tuple(_dtype_name(arg) for arg in args)
            kwargs = {name: _dtype_name(value) for name, value in kwargs.items()}
        if setting is not None and kwargs.get("layout") is None and torch.compiler.is_dynamo_compiling():
            # Read here, it is guarded: another layout is another graph.
            kwargs[DEFAULT_LAYOUT] = layouts.SEEN[setting]
        if lowers and torch.compiler.is_dynamo_compiling():
            when = _recompiled()
            # Read here, it is guarded: where another policy is in force, the graph is compiled again.
            if when == "never":
                kwargs[LOWERING] = _fingerprint()
            elif when == "policy":
                kwargs[LOWERING] = fingerprints.SEEN["policy"]
            elif when == "measurements":
                kwargs[LOWERING] = fingerprints.SEEN["policy"] + fingerprints.SEEN["measurements"]
            if attends and LOWERING in kwargs:
                kwargs[LOWERING] += _sdpa()
        result = op(*args, **kwargs)
        if function == "quantize":
            given = kwargs.get("scale") if len(args) < 3 else args[2]
            return Quantized(*result) if given is None else result[0]
        return result if out is None else _written(function, out, result)

    return call


def _lists(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords as an operator takes them."""
    return {name: _as_list(value) if name == "window" else value for name, value in kwargs.items()}


def _recompiled() -> str:
    """What compiles a graph again: the setting, as it is while the graph is traced. An exported program says nothing: where it
    runs, another policy may be in force."""
    if torch.compiler.is_exporting():
        return ""
    loading.load()
    fingerprints.begin()
    fingerprints.measured()
    return str(loading.setting("compile.recompile"))


def _fingerprint() -> str:
    """What kernels are chosen by, as it is while the graph is traced."""
    return fingerprints.SEEN["policy"]


def _sdpa() -> str:
    """What ``torch.nn.attention.sdpa_kernel`` allows while the graph is traced. torch does not guard it either: a graph keeps
    what it was compiled with."""
    return torch_state.sdpa_choice()


def _as_list(sizes: Any) -> Any:
    """One size (which may be a symbol) as a list of them."""
    return sizes if sizes is None or isinstance(sizes, list | tuple) else [sizes]


def _dtype_name(value: Any) -> Any:
    """`dtype` as an operator takes it: its name."""
    if not isinstance(value, torch.dtype):
        return value
    for name, dtype in fakes.FORMATS.items():
        if dtype == value and dtype != torch.uint8:
            return name
    return str(value).removeprefix("torch.")


def _written(name: str, out: Tensor, result: Tensor) -> Tensor:
    if out.shape != result.shape or out.dtype != result.dtype:
        text = f"{name}: 'out' does not have the shape and dtype of the result"
        if torch.compiler.is_dynamo_compiling():
            # The compiler cannot trace how our exceptions are made.
            raise ValueError(text)
        raise InvalidCallError(text, code="WRONG_OUT", hint="pass a tensor like the one the call gives without it")
    if torch.compiler.is_dynamo_compiling():
        return out.copy_(result)
    try:
        return out.copy_(result)
    except RuntimeError as error:
        # Expanded, a leaf that requires gradients, an inference tensor.
        text = f"{name}: 'out' cannot be written to: {error}"
        raise InvalidCallError(text, code="WRONG_OUT", hint="pass another tensor, or none") from error


register()
lifecycle.end_first()
