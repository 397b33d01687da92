"""The exporter: torch.export traces a module, and a handler for each op writes its nodes to the graph."""

from __future__ import annotations

import functools
import operator
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.export import graph_signature as signatures
from torch.utils import _pytree as pytree

from layerzero.call_arguments import constant_key
from layerzero.errors import ExportError, named_line, warn
from layerzero.export import refusals, sizes
from layerzero.export.building import Builder, Value, dtype_name
from layerzero.export.handlers import HANDLERS, Call
from layerzero.export.host_calls import HostCall, HostCalls, Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Ops that check dtypes and sizes. torch checked them while it traced, and the graph checks sizes in each call.
_CHECKS = frozenset(
    ["aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default", "aten.sym_size.int"]
)
_GREATEST = 2**62
#: Elements of a tensor on a device that passes may read: tables and masks, which they absorb.
_READ_BY_PASSES = 1 << 16
#: Ops whose results are views of their inputs.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("permute.default", "transpose.int", "t.default", "view.default", "expand.default", "unsqueeze.default"),
        *("squeeze.dims", "squeeze.dim", "select.int", "slice.Tensor", "detach.default", "alias.default"),
    )
)


@dataclass(frozen=True)
class Exported:
    """A model as a graph in JSON, with its weights and the form of its arguments and results."""

    #: The graph as JSON, which the native `Graph.from_document` reads.
    document: str
    #: The tensors that the document names as constants, in its order. They are the model's own, not copies.
    constants: list[torch.Tensor]
    #: Buffers and parameters that the model writes to. They are inputs of the graph, after those of the caller.
    buffers: list[torch.Tensor]
    #: Weights on a device, which the host does not read. They are inputs of the graph too, the last ones.
    held: list[torch.Tensor]
    #: Calls that stay torch's.
    host_calls: HostCalls
    #: Conditions on the sizes, as expressions of symbols. The graph is valid only where all of them hold.
    conditions: list[sympy.Basic]
    #: For each input of the graph that the caller gives: its index among the flattened arguments.
    taken: list[int]
    #: For each flattened result: its index among the results of the graph; or `None`, and the constant it is.
    given: list[tuple[int | None, Any]]
    in_spec: Any
    out_spec: Any
    #: The flattened arguments that are no tensors, by index. The graph is valid only for these values.
    fixed: dict[int, Any] = field(default_factory=dict)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """The inputs of the graph for the arguments of a call, followed by the model's own tensors that are inputs."""
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        if spec != self.in_spec:
            raise ExportError(
                f"the model was exported for arguments {self.in_spec}, and was called with {spec}",
                code="WRONG_ARGUMENTS",
                hint="pass arguments of the same structure as the examples, or export it for these",
            )
        if other := self.differing(flat):
            raise ExportError(
                f"the model was exported for other arguments: {other}",
                code="WRONG_ARGUMENTS",
                hint="pass the values it was exported for, or export it for these",
            )
        return [flat[i] for i in self.taken] + self.buffers + self.held

    def differing(self, flat: Sequence[Any]) -> str:
        """Which flattened argument has another value than the one the model was exported for; ``""`` if none has."""
        for at, value in self.fixed.items():
            if constant_key(flat[at]) != constant_key(value):
                given = "a tensor" if isinstance(flat[at], torch.Tensor) else repr(flat[at])
                return f"argument {at} is {given}, the graph is for {value!r}"
        return ""

    def unflatten(self, results: Sequence[Any]) -> Any:
        """The results of the graph as the model gives them."""
        flat = [constant if at is None else results[at] for at, constant in self.given]
        return pytree.tree_unflatten(flat, self.out_spec)

    def violated(self, symbols: Mapping[str, int]) -> list[str]:
        """The conditions that do not hold for these sizes."""
        numbers = {sympy.Symbol(name): number for name, number in symbols.items()}
        by_name = [
            (one, {s: numbers[sympy.Symbol(s.name)] for s in one.free_symbols if sympy.Symbol(s.name) in numbers})
            for one in self.conditions
        ]
        return [str(one) for one, known in by_name if one.subs(known) == sympy.false]

    @property
    def hosts(self) -> list[str]:
        """The functions that stay torch's, each once."""
        return list(dict.fromkeys(call.name for call in self.host_calls.calls))


def export(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    held: bool = False,
) -> Exported:
    """Exports a module for example arguments; `dynamic_shapes` as torch.export takes them.

    `held`: weights are inputs of the graph, as those on a device always are.
    """
    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"a {type(module).__name__} is no torch.nn.Module", code="NOT_A_MODEL", hint="pass a module")
    try:
        # Autocast would become casts of the graph.
        with torch.no_grad(), torch._C._DisableAutocast():
            program = torch.export.export(
                module,
                tuple(args),
                dict(kwargs or {}),
                dynamic_shapes=dynamic_shapes,
                strict=False,
                # Comparisons of sizes that torch cannot prove are kept as conditions.
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as raised:
        raise refusals.not_exported(raised) from raised
    name = type(module).__name__
    if (found := _as_it_is(program, name, held)) is not None:
        return found
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), warnings.catch_warnings():
            # torch warns about its own code.
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*treespec")
            program = program.run_decompositions(dict(_decompositions()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as raised:
        raise refusals.not_exported(raised) from raised
    return of_program(program, name, held)


def _as_it_is(program: torch.export.ExportedProgram, name: str, held: bool) -> Exported | None:
    """The graph of a program, if each of its ops has a handler and none writes in place: then torch need not decompose it."""
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    changes = any(getattr(getattr(op, "_schema", None), "is_mutable", False) for op in ops)
    if changes or any(isinstance(op, torch._ops.HigherOrderOperator) for op in ops):
        return None
    try:
        found = of_program(program, name, held)
    except ExportError:
        return None
    return None if len(found.host_calls) else found


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """torch's decompositions, without those of ops that have a handler."""
    table: Any = torch.export.default_decompositions()
    return {op: decomposition for op, decomposition in table.items() if str(op) not in HANDLERS}


def of_program(program: torch.export.ExportedProgram, name: str, held: bool = False) -> Exported:
    """The graph of an exported program without ops that write in place."""
    return _Translation(program, hold=held).run(name)


@dataclass
class _Translation:
    """The translation of one program."""

    program: torch.export.ExportedProgram
    #: Whether weights are inputs, wherever they are.
    hold: bool = False
    builder: Builder = field(default_factory=Builder)
    #: What each node of the program became: a value, a size, a list of values, or a plain object.
    known: dict[torch.fx.Node, Any] = field(default_factory=dict)
    hosts: HostCalls = field(default_factory=HostCalls)
    conditions: list[sympy.Basic] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    fixed: dict[int, Any] = field(default_factory=dict)
    #: Inputs that the model writes to, by torch's names.
    changed: dict[str, Value] = field(default_factory=dict)
    buffers: list[torch.Tensor] = field(default_factory=list)
    #: Weights on a device, and the value of each.
    held: dict[tuple[Any, ...], tuple[torch.Tensor, Value]] = field(default_factory=dict)
    #: For each node: the weight that it is or is a view of, which a call of torch gets as it is; else `None`.
    weights: dict[torch.fx.Node, torch.Tensor | None] = field(default_factory=dict)

    def run(self, name: str) -> Exported:
        nodes = list(self.program.graph.nodes)
        self.builder.names.clear()
        self._placeholders([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._attribute(node)
        return self._results(name, nodes[-1])

    # Inputs.

    def _placeholders(self, nodes: list[torch.fx.Node]) -> None:
        signature = self.program.graph_signature
        changes = _changed(signature)
        flat = 0
        late: list[tuple[torch.fx.Node, str]] = []
        weights: list[tuple[torch.fx.Node, str]] = []
        for node, spec in zip(nodes, signature.input_specs, strict=True):
            kind, target = spec.kind, spec.target
            if kind == signatures.InputKind.USER_INPUT:
                self._user_input(node, spec, flat)
                flat += 1
            elif kind in (signatures.InputKind.CUSTOM_OBJ, signatures.InputKind.TOKEN):
                raise refusals.unsupported(
                    f"the model holds {target or kind.name}, which is no tensor", node, "replace it by tensors"
                )
            elif target in changes:
                late.append((node, str(target)))
            else:
                weights.append((node, str(target)))
        for node, target in late:
            tensor = self._tensor(target)
            value = self.builder.input(node.name, tensor.dtype, tensor.shape)
            self.known[node] = self.changed[target] = value
            self.buffers.append(tensor.detach())
        for node, target in weights:
            self.known[node] = self._weight_value(target, self._tensor(target))

    def _weight_value(self, name: str, tensor: torch.Tensor) -> Value:
        """A constant, which passes may read; or an input, where it is a weight or large and the host has no memory of it."""
        small = tensor.numel() <= _READ_BY_PASSES and not isinstance(tensor, torch.nn.Parameter)
        if small or (tensor.device.type == "cpu" and not self.hold):
            return self.builder.constant(name, tensor)
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self.held:
            if (other := next((one.device for one, _ in self.held.values()), tensor.device)) != tensor.device:
                raise ExportError(
                    f"the model has weights on {other} and on {tensor.device}",
                    code="NOT_EXPORTABLE",
                    hint="put it on one device; a graph runs on one",
                )
            value = self.builder.input(name, tensor.dtype, tensor.shape)
            self.held[key] = (tensor, value)
        return self.held[key][1]

    def _user_input(self, node: torch.fx.Node, spec: Any, at: int) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._checked(value, node)
            self.known[node] = self.builder.input(node.name, value.dtype, value.shape)
            self.changed.setdefault(node.name, self.known[node])
            self.taken.append(at)
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise refusals.unsupported(
                f"the argument '{node.name}' is a number that may change",
                node,
                "pass it as a tensor, or do not name it in dynamic_shapes",
            )
        else:
            self.known[node] = self.fixed[at] = getattr(spec.arg, "value", None)

    def _tensor(self, target: str) -> torch.Tensor:
        found = self.program.state_dict.get(target)
        if found is None:
            found = self.program.constants[target]
        if not isinstance(found, torch.Tensor):
            raise ExportError(
                f"the model holds {target}, which is no tensor", code="NOT_EXPORTABLE", hint="replace it by tensors"
            )
        return found

    def _attribute(self, node: torch.fx.Node) -> None:
        found: Any = self.program.graph_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        is_tensor = isinstance(found, torch.Tensor)
        self.known[node] = self._weight_value(str(node.target), found) if is_tensor else found

    # Nodes.

    def _call(self, node: torch.fx.Node) -> None:
        result = node.meta.get("val")
        if node.target is operator.getitem:
            source = self.known[node.args[0]]  # type: ignore[index]
            self.known[node] = source[node.args[1]]
            return
        op = str(node.target)
        if op in _CHECKS or isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            self.known[node] = self._size_of(result, node)
            return
        if op == "aten._assert_scalar.default":
            condition = self.known.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(condition, sympy.Basic) and condition != sympy.true:
                self.conditions.append(condition)
            return
        self.builder.node, self.builder.origin = node.name, _origin(node)
        try:
            self.known[node] = self._translated(node, op, result)
        except sizes.UnknownSizeError as raised:
            hint = "a graph's sizes follow from those of its inputs; keep masked elements in the place of removing them"
            raise refusals.unsupported(f"{op}: {raised}", node, hint) from raised

    def _on_the_device(self, node: Any, output: torch.fx.Node) -> None:
        """Refuses a result on another device than the weights': a graph gives all of them there."""
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        where = next((one.device for one, _ in self.held.values()), None)
        if isinstance(value, torch.Tensor) and where is not None and value.device != where:
            raise refusals.unsupported(
                f"the model gives a result on {value.device}, its weights are on {where}",
                output,
                "move results outside",
            )

    def _size_of(self, result: Any, node: torch.fx.Node) -> Any:
        if isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = result.node.expr
            return int(expression) if isinstance(expression, sympy.Integer) else expression
        return result

    def _translated(self, node: torch.fx.Node, op: str, result: Any) -> Any:
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            self._checked(tensor, node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise refusals.unsupported(
                f"{op} is control flow, which a graph does not have", node, "use torch.where on both results"
            )
        if handler := HANDLERS.get(op):
            found = self._handled(handler, node, op, result)
            if found is not NotImplemented:
                return found
        return self._host(node, result)

    def _handled(self, handler: Any, node: torch.fx.Node, op: str, result: Any) -> Any:
        """The result of a handler. `NotImplemented` if the node must stay torch's; then nothing is written."""
        names, given = self._arguments(node)
        written = len(self.builder.nodes)
        try:
            found = handler(self.builder, Call(result, _used(node, result), names), *given)
        except (ExportError, sizes.UnknownSizeError):
            raise
        except Exception as raised:  # noqa: BLE001 - there is a warning
            found = NotImplemented
            if not any(isinstance(one, sympy.Basic) for one in pytree.tree_leaves(given)):
                # The graph is correct without the handler, and slower.
                warn(f"{op} stays torch's: LayerZero's handler failed, please report it: {named_line(raised)}")
        # An attribute that must be a number is a symbol.
        symbolic = any(not _is_data(row["attrs"]) for row in self.builder.nodes[written:])
        if found is NotImplemented or symbolic:
            for row in self.builder.nodes[written:]:
                self.builder.names.discard(row["output"])
            del self.builder.nodes[written:]
            return NotImplemented
        return found

    def _arguments(self, node: torch.fx.Node) -> tuple[tuple[str, ...], list[Any]]:
        """The names and the values of the arguments, in the order of the op's schema."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = []
        for i, argument in enumerate(schema):
            if i < len(node.args):
                given.append(self._resolved(node.args[i]))
            elif argument.name in node.kwargs:
                given.append(self._resolved(node.kwargs[argument.name]))
            else:
                given.append(argument.default_value if argument.has_default_value() else None)
        kept = [i for i, argument in enumerate(schema) if not _is_of_placement(argument)]
        return tuple(schema[i].name for i in kept), [given[i] for i in kept]

    def _resolved(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.known[argument]
        if isinstance(argument, (list, tuple)):
            return [self._resolved(one) for one in argument]
        return argument

    def _checked(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        if tensor.layout != torch.strided or tensor.dtype.is_complex:
            what = f"'{node.name}' is a {tensor.layout} tensor of {dtype_name(tensor.dtype)}"
            raise refusals.unsupported(what, node, "a graph holds dense tensors of real numbers")
        for n in tensor.shape:
            try:
                sizes.text(sizes.size(n))
            except sizes.UnknownSizeError as raised:
                hint = "keep masked elements in the place of removing them: a graph's sizes follow from its inputs'"
                raise refusals.unsupported(f"{node.target}: {raised}", node, hint) from raised

    # What stays torch's.

    def _constant(self, node: torch.fx.Node) -> torch.Tensor | None:
        """The weight that a node is, or is a view of. A call of torch gets it without a copy."""
        if node not in self.weights:
            self.weights[node] = self._weight(node)
        return self.weights[node]

    def _weight(self, node: torch.fx.Node) -> torch.Tensor | None:
        if node.op == "placeholder":
            signature = self.program.graph_signature
            target = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.get(node.name)
            changes = target in _changed(signature)
            return None if target is None or changes else self._tensor(target).detach()
        if node.op != "call_function" or str(node.target) not in _VIEWS:
            return None
        of = self._constant(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else None
        plain = not any(isinstance(one, torch.fx.Node) for one in pytree.tree_leaves((node.args[1:], node.kwargs)))
        return node.target(of, *node.args[1:], **node.kwargs) if of is not None and plain else None  # type: ignore

    def _host(self, node: torch.fx.Node, result: Any) -> Any:
        inputs: list[Value] = []

        def slot(argument: Any) -> Any:
            if not isinstance(argument, torch.fx.Node):
                return argument
            value = self.known[argument]
            if isinstance(value, Value):
                if (tensor := self._constant(argument)) is not None:
                    return tensor
                inputs.append(value)
                return Slot(len(inputs) - 1)
            if isinstance(value, sympy.Expr):
                inputs.append(self.builder.iota(value, 1, 1))
                return Slot(len(inputs) - 1, is_number=True)
            return value

        args, kwargs = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), slot)
        number = len(self.hosts)
        self.hosts.calls.append(HostCall(node.target, tuple(args), dict(kwargs), _origin(node)))  # type: ignore[arg-type]

        def emitted(tensor: torch.Tensor, which: int) -> Value:
            shape = [sizes.text(sizes.size(n)) for n in tensor.shape]
            attributes = {"call": number, "result": which, "target": str(node.target), "shape": shape}
            attributes["dtype"] = dtype_name(tensor.dtype)
            return self.builder.emit("host", inputs, tensor.dtype, tensor.shape, **attributes)

        if isinstance(result, torch.Tensor):
            return emitted(result, 0)
        if not isinstance(result, (tuple, list)):
            raise refusals.unsupported(f"{node.target} gives no tensor", node, "take it out of the model")
        used = _used(node, result)
        return [
            emitted(one, i) if i in used and isinstance(one, torch.Tensor) else None for i, one in enumerate(result)
        ]

    # Results.

    def _results(self, name: str, output: torch.fx.Node) -> Exported:
        outputs: list[str] = []
        updates: list[list[str]] = []
        given: list[tuple[int | None, Any]] = []
        specs = self.program.graph_signature.output_specs
        flat: Any = output.args[0]
        for node, spec in zip(flat, specs, strict=True):
            value = self.known[node] if isinstance(node, torch.fx.Node) else node
            if spec.kind in _UPDATES:
                updates.append([self.changed[str(spec.target)].name, value.name])
            elif spec.kind != signatures.OutputKind.USER_OUTPUT:
                hint = "a graph gives results and updates tensors: take it out of the model's forward"
                raise refusals.unsupported(f"the model gives {spec.kind.name} '{spec.target}'", output, hint)
            elif isinstance(value, Value):
                self._on_the_device(node, output)
                given.append((len(outputs), None))
                outputs.append(value.name)
            elif isinstance(value, sympy.Expr):
                raise refusals.unsupported("the model gives a size", output, "read it from the shape of a result")
            else:
                given.append((None, value))
        symbols = [
            {"name": str(symbol), "min": max(int(bounds.lower), 0), "max": _most(bounds.upper)}
            for symbol, bounds in self.program.range_constraints.items()
            if str(symbol).startswith("s")
        ]
        return Exported(
            document=self.builder.document(name, symbols, outputs, updates),
            constants=list(self.builder.constants.values()),
            buffers=self.buffers,
            held=[tensor for tensor, _ in self.held.values()],
            host_calls=self.hosts,
            conditions=self.conditions,
            taken=self.taken,
            given=given,
            in_spec=self.program.call_spec.in_spec,
            out_spec=self.program.call_spec.out_spec,
            fixed=self.fixed,
        )


def _is_data(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (bool, int, float, str))


#: Outputs of a program that are written to tensors of the model or of the caller.
_UPDATES = (
    signatures.OutputKind.BUFFER_MUTATION,
    signatures.OutputKind.PARAMETER_MUTATION,
    signatures.OutputKind.USER_INPUT_MUTATION,
)


def _changed(signature: Any) -> set[str]:
    """The buffers and parameters that a program changes."""
    return {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}


def _most(bound: Any) -> int | None:
    """The upper end of a range, if a size can reach it."""
    return int(bound) if bound.is_Integer and int(bound) < _GREATEST else None


def _used(node: torch.fx.Node, result: Any) -> frozenset[int]:
    """The indices of the results of a node that are used."""
    if isinstance(result, torch.Tensor):
        return frozenset([0])
    reads = [user.args[1] for user in node.users if user.target is operator.getitem]
    return frozenset(int(i) for i in reads)  # type: ignore[arg-type]


def _origin(node: torch.fx.Node) -> str:
    """The name of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


#: Arguments that only say where and how a result is stored, or that only differentiation needs.
_PLACEMENT = frozenset(["dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "copy", "implicit"])


def _is_of_placement(argument: Any) -> bool:
    return argument.name in _PLACEMENT and bool(argument.kwarg_only)
