"""Which calls a model makes, seen without running one: its tensors have shapes and no memory.

A forward pass runs on fake tensors, and a mode sees every function it calls. Nothing of the model is touched: a tensor of
its own is replaced by a fake one in each call that takes it, so other threads may go on using the model meanwhile.
"""

from __future__ import annotations

import linecache
import math
import sys
import threading
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
from torch._C import DisableTorchFunction
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

from layerzero import devices, layouts, patterns
from layerzero.costs import Costs, Share, flops_of
from layerzero.equivalents import EQUIVALENTS, SOURCES
from layerzero.inspection import TensorSpec
from layerzero.integrations.torch_operators import autocast
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT
from layerzero.integrations.torch_operators.operators import LOWERING, OPERATORS
from layerzero.patterns import Node


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
    #: How many such calls.
    times: int = 1


def stand_ins(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments to ask about: for each outline a tensor without memory."""

    def tensor(of: Outline) -> Tensor:
        made = torch.empty_strided(of.shape, of.strides, dtype=of.dtype, device=of.device)
        return made.requires_grad_(of.grad)

    with FakeTensorMode():
        return {name: tensor(value) if isinstance(value, Outline) else value for name, value in arguments.items()}


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
        #: Calls that compute the same as some of those seen, in another way: with an addition in a norm.
        self.alternatives: list[Seen] = []
        #: How often what is called now is called in all.
        self.times = 1
        #: Whether a product with a stack of weights counts as one of each: experts that see every token.
        self.stacks = False
        #: Every call of torch's.
        self.nodes: list[Node] = []
        self.costs = Costs()
        self._fake, self._device = fake, device
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self._names = {id(module): name for name, module in modules}
        # Held, so that an id stays that of its tensor.
        self._faked: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: dict[int, Node] = {}
        self._gates: dict[int, tuple[Tensor, Tensor]] = {}
        self._norms: list[tuple[Node, patterns.Found]] = []
        #: What is seen, with its place among the calls of torch's.
        self._placed: list[tuple[int, Seen]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ and not isinstance(args[0], FakeTensor) and not args[0].is_meta:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = tree_map(self.faked, (args, kwargs))
        if func is F.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **kwargs)
        before = self.costs.flops, self.costs.bytes
        result = func(*args, **kwargs)
        node = self._note(func, args, kwargs, result)
        node.flops, node.bytes = self.costs.flops - before[0], self.costs.bytes - before[1]
        self._look(func, args, kwargs, result, node)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> Node:
        """Remembers a call, and what made the tensors it takes."""
        made_by: dict[int, Node] = {}
        for value in chain(args, kwargs.values()):
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Tensor) and (maker := self._made.get(id(item))) is not None:
                    made_by[id(item)] = maker
        name = getattr(func, "__name__", "") or ""
        node = Node(name, args, kwargs, result, made_by)
        node.times = self.times
        node.module = self._module() if name in patterns.ROOTS else ""
        self.nodes.append(node)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._made[id(item)] = node
        return node

    def finish(self) -> None:
        """Finds the calls that are written out, and the additions that a norm could have in it."""
        places = {id(node): place for place, node in enumerate(self.nodes)}
        written = [(places[id(node)], node, found) for node, found in patterns.find(self.nodes)]
        for place, node, found in written:
            one = self._seen(found.function, found.arguments, f"{found.function} written out", node.module, node.times)
            self._placed.append((place, one))
        for node, found in self._norms + [(node, found) for _, node, found in written if found.function == "rms_norm"]:
            fused = patterns.add_before(found, lambda tensor: self._made.get(id(tensor)))
            if fused is not None:
                self.alternatives.append(
                    self._seen(fused.function, fused.arguments, fused.function, node.module, node.times)
                )
        self.seen = [one for _, one in sorted(self._placed, key=lambda placed: placed[0])]

    def forget(self) -> None:
        """Starts anew: what was called so far only prepared the rest."""
        for seen in (self.nodes, self._placed, self._norms, self.alternatives, self.skipped):
            seen.clear()

    def alternative(self, function: str, arguments: Mapping[str, Any], times: int = 1) -> None:
        """Adds a call that computes the same as some of those seen."""
        with DisableTorchFunction():
            one = self._seen(function, arguments, function, self._module(), times * self.times)
        self.alternatives.append(one)

    def not_ours(self, source: str, why: str, flops: int, moved: int) -> None:
        """Adds a call that no operation of ours computes."""
        self.skipped.append((source, self._module(), why))
        node = Node(source, (), {}, None, {})
        node.flops, node.bytes, node.times = flops, moved, self.times
        self.nodes.append(node)

    def share(self) -> Share:
        """How much of what was called is in calls of ours."""
        flops = sum(node.flops * node.times for node in self.nodes)
        moved = sum(node.bytes * node.times for node in self.nodes)
        ours = [node for node in self.nodes if node.covered]
        return Share(
            flops, moved, sum(node.flops * node.times for node in ours), sum(node.bytes * node.times for node in ours)
        )

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

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any, node: Node) -> None:
        if isinstance(func, OpOverload | OpOverloadPacket):
            namespace, _, name = str(getattr(func, "_qualified_op_name", func)).partition("::")
            name = name.partition(".")[0]
            if namespace == "layerzero" and name in OPERATORS:
                operator = OPERATORS[name]
                self._record(name, {**operator.values(args), **kwargs}, f"layerzero.{name}", node)
            return
        if (equivalent := EQUIVALENTS.get(func)) is not None:
            source = SOURCES.get(func) or f"torch.nn.functional.{func.__name__}"
            found = equivalent(*args, **kwargs)
            if isinstance(found, str):
                self.skipped.append((source, self._module(), found))
            elif found is not None:
                function, arguments = found
                self._record(function, _autocast(function, arguments), source, node)
        elif func is torch.bmm and self.stacks and args[1].dim() == 3 and self._is_weight(args[1]):
            rows, weights = args[0][0], args[1][0].t()
            self.times *= args[1].shape[0]
            flops = node.flops
            self._record("linear", {"input": rows, "weight": weights}, "torch.bmm", node)
            self.times //= args[1].shape[0]
            node.flops = flops
        elif func in _SILU:
            self._gates[id(result)] = result, args[0] if args else kwargs["input"]
        elif func in _MULTIPLY and len(args) == 2:
            for one, other in (args, args[::-1]):
                _, gate = self._gates.get(id(one), (None, None))
                if gate is not None and isinstance(other, Tensor) and _alike(gate, other):
                    self._made[id(one)].covered = True
                    self._record("silu_mul", {"gate": gate, "up": other}, "torch.nn.functional.silu", node)
                    break

    def _record(self, function: str, arguments: dict[str, Any], source: str, node: Node) -> None:
        one = self._seen(function, arguments, source, self._module(), self.times)
        node.covered = True
        node.flops = flops_of(function, one.arguments) or node.flops
        node.module = one.module
        if function == "rms_norm":
            self._norms.append((node, patterns.Found(function, {"weight": None, **arguments}, [])))
        self._placed.append((len(self.nodes) - 1, one))

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether it is the fake of a tensor the model has."""
        return any(fake is tensor for _, fake in self._faked.values())

    def _seen(self, function: str, arguments: Mapping[str, Any], source: str, module: str, times: int) -> Seen:
        recorded = torch.is_grad_enabled()
        device, grad = "cpu", False
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, patterns.Table):
                strides = tuple(math.prod(value.shape[place + 1 :]) for place in range(len(value.shape)))
                given[name] = Outline(value.shape, value.dtype, strides, value.like.device, False)
            elif isinstance(value, Tensor):
                wanted = recorded and value.requires_grad
                given[name] = Outline(tuple(value.shape), value.dtype, value.stride(), value.device, wanted)
                device, grad = str(value.device), grad or wanted
            elif value is not None and name not in (DEFAULT_LAYOUT, LOWERING):
                given[name] = value
        if (layout := _layout_here(function, given)) is not None:
            given["layout"] = layout
        return Seen(function, given, device, grad, module, source, times)

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


#: Calls a model: it gets the model, what sees the calls, and the inputs.
Run = Callable[[Any, Recorder, tuple[Any, ...], dict[str, Any]], object]


class Obstacle(NamedTuple):
    """Why a forward pass cannot be run on tensors without memory."""

    error: Exception
    module: str
    location: str
    line: str
    hint: str


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run | None = None) -> Recorder | Obstacle:
    """Runs a model on fakes of these inputs; gives what it called, or what stood in the way.

    `run` calls the model where one call is not all of it: to fill a cache first.
    """
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
        try:
            with recorder.costs, recorder, _recording(recorder):
                run(model, recorder, args, kwargs) if run is not None else model(*args, **kwargs)
        # Whatever a model raises, it is told with the line that did.
        except Exception as error:  # noqa: BLE001
            return _obstacle(error, recorder)
        recorder.finish()
    return recorder


_HERE = threading.local()


def recorder_here() -> Recorder | None:
    """What sees the calls of this thread, while a model is traced."""
    return getattr(_HERE, "recorder", None)


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    before, _HERE.recorder = recorder_here(), recorder
    try:
        yield
    finally:
        _HERE.recorder = before


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
