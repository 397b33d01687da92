"""Which calls a model makes, seen without running one: its tensors have shapes and no memory.

A forward pass runs on fake tensors, and a mode sees every function it calls. Nothing of the model is touched: a tensor of
its own is replaced by a fake one in each call that takes it, so other threads may go on using the model meanwhile.
"""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from layerzero import devices, layouts
from layerzero.inspection import TensorSpec
from layerzero.integrations import autocast
from layerzero.integrations.operators import DEFAULT_LAYOUT, LOWERING, OPERATORS

#: A call of ours: the function and its arguments; or why a call of torch's is none.
Equivalent = tuple[str, dict[str, Any]] | str


class Outline(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: torch.device
    grad: bool

    def to_spec(self) -> dict[str, Any]:
        """As a call that is written down has it; strides only where they are not the usual ones."""
        spec: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return {**spec, "strides": list(self.strides)}
            expected *= size
        return spec


class Seen(NamedTuple):
    """One call that was made."""

    function: str
    #: Tensors as :class:`Outline`.
    arguments: dict[str, Any]
    device: str
    grad: bool
    module: str
    source: str


def stand_ins(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments to ask about: for each outline a tensor without memory."""

    def tensor(of: Outline) -> Tensor:
        made = torch.empty_strided(of.shape, of.strides, dtype=of.dtype, device=of.device)
        return made.requires_grad_(of.grad)

    with FakeTensorMode():
        return {name: tensor(value) if isinstance(value, Outline) else value for name, value in arguments.items()}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Equivalent:
    if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
        return f"its tensors have {query.dim()} dimensions; attention is over 3 or 4"
    if is_causal and query.shape[-2] != key.shape[-2]:
        # torch lets query i see the keys up to i, LayerZero those up to i + seq_k - seq_q.
        return "is_causal with as many queries as keys is the only one that means the same here"
    if query.dim() == 3:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    given = {"query": query, "key": key, "value": value, "causal": is_causal, "layout": "BHSD"}
    return "attention", {**given, "attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Equivalent:
    if input.dim() < 1 or weight.dim() != 2:
        return "its weight is no matrix"
    return "linear", {"input": input, "weight": weight, "bias": bias}


def _over_last(input: Tensor, sizes: Any, *weights: Tensor | None) -> list[Tensor | None] | None:
    """The tensors of a norm over several dimensions, as one over all of their elements in a row."""
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    if not sizes or input.dim() < len(sizes) or list(input.shape[-len(sizes) :]) != sizes:
        return None
    return [input.flatten(-len(sizes)), *(weight if weight is None else weight.flatten() for weight in weights)]


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Equivalent:
    flat = _over_last(input, normalized_shape, weight)
    if flat is None:
        return f"normalized_shape {normalized_shape} is not how the input {tuple(input.shape)} ends"
    return "rms_norm", {
        "input": flat[0],
        "weight": flat[1],
        "eps": torch.finfo(input.dtype).eps if eps is None else eps,
    }


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Equivalent:
    flat = _over_last(input, normalized_shape, weight, bias)
    if flat is None:
        return f"normalized_shape {normalized_shape} is not how the input {tuple(input.shape)} ends"
    return "layer_norm", {"input": flat[0], "weight": flat[1], "bias": flat[2], "eps": eps}


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> Equivalent:
    if max_norm is not None:
        return "max_norm changes the table"
    return "embedding", {"indices": input, "weight": weight}


def _torch_embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Equivalent:
    return "embedding", {"indices": indices, "weight": weight}


def _gelu(input: Tensor, approximate: str = "none") -> Equivalent:
    return "gelu", {"input": input, "approximate": approximate}


#: torch's functions that compute what one of ours does, each with the call of ours it comes down to.
EQUIVALENTS: Mapping[Any, Callable[..., Equivalent]] = {
    F.scaled_dot_product_attention: _attention,
    F.linear: _linear,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    F.gelu: _gelu,
}

_SILU = frozenset([F.silu, torch._C._nn.silu, torch._C._nn.silu_])
_MULTIPLY = frozenset(
    [
        torch.mul,
        torch.multiply,
        *(getattr(Tensor, f) for f in ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")),
    ]
)
#: Functions that read values. A tensor of the model's own has some, and may be asked.
_READ = frozenset(getattr(Tensor, f) for f in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"))


class Recorder(TorchFunctionMode):
    """Sees the calls of operations LayerZero knows, its own and torch's, and runs none of them."""

    def __init__(self, model: Any, fake: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        #: Calls of torch's that look like one of ours and are none: function, module, why.
        self.skipped: list[tuple[str, str, str]] = []
        self._fake, self._device = fake, device
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self._names = {id(module): name for name, module in modules}
        # Held, so that an id stays that of its tensor.
        self._faked: dict[int, tuple[Tensor, Tensor]] = {}
        self._gates: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ and not isinstance(args[0], FakeTensor) and not args[0].is_meta:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = tree_map(self.faked, (args, kwargs))
        if func is F.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        self._look(func, args, kwargs, result)
        return result

    def faked(self, value: Any) -> Any:
        """A tensor without memory, of the same kind; anything else as it is."""
        if isinstance(value, TensorSpec):
            dtype = value.dtype if isinstance(value.dtype, torch.dtype) else getattr(torch, str(value.dtype))
            with self._fake:
                return torch.empty(value.shape, dtype=dtype, device=value.device)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        known = self._faked.get(id(value))
        if known is None:
            known = self._faked[id(value)] = value, self._made_of(value)
        return known[1]

    def _made_of(self, value: Tensor) -> Tensor:
        if not value.is_meta:
            return self._fake.from_tensor(value)
        # What has no device yet is where the inputs are.
        with self._fake:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
        return made.requires_grad_(value.requires_grad)

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(func, OpOverload | OpOverloadPacket):
            namespace, _, name = str(getattr(func, "_qualified_op_name", func)).partition("::")
            name = name.partition(".")[0]
            if namespace == "layerzero" and name in OPERATORS:
                operator = OPERATORS[name]
                self._record(name, {**operator.values(args), **kwargs}, f"layerzero.{name}")
            return
        if (equivalent := EQUIVALENTS.get(func)) is not None:
            source = f"torch.nn.functional.{func.__name__}"
            found = equivalent(*args, **kwargs)
            if isinstance(found, str):
                self.skipped.append((source, self._module(), found))
            else:
                function, arguments = found
                self._record(function, _autocast(function, arguments), source)
        elif func in _SILU:
            self._gates[id(result)] = result, args[0] if args else kwargs["input"]
        elif func in _MULTIPLY and len(args) == 2:
            for one, other in (args, args[::-1]):
                _, gate = self._gates.get(id(one), (None, None))
                if gate is not None and isinstance(other, Tensor) and _alike(gate, other):
                    self._record("silu_mul", {"gate": gate, "up": other}, "torch.nn.functional.silu")
                    break

    def _record(self, function: str, arguments: dict[str, Any], source: str) -> None:
        recorded = torch.is_grad_enabled()
        device, grad = "cpu", False
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                wanted = recorded and value.requires_grad
                given[name] = Outline(tuple(value.shape), value.dtype, value.stride(), value.device, wanted)
                device, grad = str(value.device), grad or wanted
            elif value is not None and name not in (DEFAULT_LAYOUT, LOWERING):
                given[name] = value
        if (layout := _layout_here(function, given)) is not None:
            given["layout"] = layout
        self.seen.append(Seen(function, given, device, grad, self._module(), source))

    def _module(self) -> str:
        """The innermost module whose code is being run."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if (name := self.module_of(frame)) is not None:
                return name
            frame = frame.f_back
        return ""

    def module_of(self, frame: types.FrameType) -> str | None:
        """The module whose method a frame runs."""
        code = frame.f_code
        return self._names.get(id(frame.f_locals.get(code.co_varnames[0]))) if code.co_argcount else None


def _layout_here(function: str, given: Mapping[str, Any]) -> str | None:
    """The layout of a call that does not say: it is asked about later, maybe where another one is in force."""
    setting = OPERATORS[function].layout_setting if function in OPERATORS else None
    if setting is None or given.get("layout") is not None:
        return None
    tensor = next(given[name] for name in ("key_cache", "query", "input") if name in given)
    return layouts.here(setting) if len(tensor.shape) == 4 else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _autocast(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are under autocast, which casts before a call is made."""
    lowers = function in autocast.LOWERED
    return {name: autocast._cast(value) for name, value in arguments.items()} if lowers else arguments


def _opened(function: Any) -> types.FunctionType:
    """The same function, with the calls inside of it seen: its own question whether a mode is there is answered no."""
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Obstacle(NamedTuple):
    """Why a forward pass cannot be run on tensors without memory."""

    error: Exception
    module: str
    location: str
    line: str
    hint: str


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | Obstacle:
    """Runs a model on fakes of these inputs; gives what it called, or what stood in the way."""
    # What a compiler made of it cannot be looked into.
    model = getattr(model, "_orig_mod", model)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(model, fake, _device_of(model, args, kwargs))
    with ExitStack() as stack:
        stack.enter_context(_untouched(model))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        args, kwargs = tree_map(recorder.faked, (args, kwargs))
        stack.enter_context(fake)
        stack.enter_context(recorder)
        try:
            model(*args, **kwargs)
        # Whatever a model raises, it is told with the line that did.
        except Exception as error:  # noqa: BLE001
            return _obstacle(error, recorder)
    return recorder


def _device_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where the inputs are, else the weights."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor | TensorSpec):
            found.append(value)

    tree_map(look, (args, kwargs))
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    return torch.device(devices.resolve(of=chain(found, weights)))


@contextmanager
def _untouched(model: Any) -> Iterator[None]:
    """Puts back attributes of the model that a forward pass sets: they would hold tensors without memory."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    holders = [holder for module in modules for holder in (vars(module), *vars(module).values())]
    dicts = [(holder, dict(holder)) for holder in holders if isinstance(holder, dict)]
    lists = [(holder, list(holder)) for holder in holders if type(holder) is list]
    try:
        yield
    finally:
        for there, before in dicts:
            for key in [key for key in there if key not in before]:
                del there[key]
            for key, value in before.items():
                if there.get(key) is not value:
                    there[key] = value
        for items, kept in lists:
            if [*map(id, items)] != [*map(id, kept)]:
                items[:] = kept


def _obstacle(error: Exception, recorder: Recorder) -> Obstacle:
    """Where a forward pass ended, in the model's own words, and what to do about it."""
    libraries = [Path(torch.__file__).parent, Path(__file__).parent]
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if not any(Path(at[0].f_code.co_filename).is_relative_to(lib) for lib in libraries)]
    frame, number = (own or frames)[-1]
    file = frame.f_code.co_filename
    modules = [name for frame, _ in frames if (name := recorder.module_of(frame)) is not None]
    return Obstacle(
        error=error,
        module=modules[-1] if modules else "",
        location=f"{file}:{number} in {frame.f_code.co_name}",
        line=linecache.getline(file, number).strip(),
        hint=_advice(error),
    )


def _advice(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            "what it does next depends on the values of a tensor, and there are none here: move that step out of "
            "forward, or trace the parts on both sides of it by themselves"
        )
    if isinstance(error, UnsupportedOperatorException) or "register_fake" in str(error):
        return "say what the operator gives with torch.library.register_fake, or trace the parts around it"
    return "run the model on these inputs: if that works, trace the parts on both sides of this line by themselves"
