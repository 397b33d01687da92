"""The public functions as torch operators: names, order and types of their arguments, derived from the schemas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layerzero import _native
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT, RULES, SEED_TENSOR

#: How the call becomes part of a compiled graph, an argument of operators beside those of the function: the fingerprint of what its kernel is to be chosen
#: by while the graph is compiled, `=` and the kernel that was chosen, or :data:`SELECTED`.
LOWERING = "lowering"
#: The kernel is selected at every call.
SELECTED = "selected"
#: Functions on queries, keys and values that lie side by side; their results are in their layout.
ATTENTION = frozenset(["attention", "cross_attention"])
#: Functions whose kernel may be chosen while a graph is compiled.
LOWERABLE = frozenset(
    [
        "alibi_bias",
        "attention",
        "cross_attention",
        "embedding",
        "fused_add_rms_norm",
        "fused_mlp",
        "gelu",
        "layer_norm",
        "linear",
        "rms_norm",
        "rope",
        "silu_mul",
        "softmax",
    ]
)

# How arguments that are neither tensors nor parameters of a schema enter an operator. `out` does not: an operator
# gives new tensors, and the caller's is filled from them. `return_lse` names another operator.
_SPECIALS = {
    "window": "SymInt[]?",
    "layout": "str?",
    "normalized_shape": "SymInt[]?",
    "format": "str?",
    "generator": "Generator?",
}
# Sizes may be symbols while a graph is traced.
_TYPES = {"bool": "bool", "int": "SymInt", "float": "float", "str": "str"}


@dataclass(frozen=True)
class Argument:
    """One argument of an operator."""

    name: str
    type: str
    required: bool
    default: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return self.type.startswith("Tensor")

    def declared(self) -> str:
        """As a schema writes it."""
        if self.required:
            return f"{self.type} {self.name}"
        default = f'"{self.default}"' if isinstance(self.default, str) else self.default
        return f"{self.type} {self.name}={default}"


@dataclass(frozen=True)
class Operator:
    """A public function as a torch operator.

    Its arguments are the function's, in the same order; those that are keyword-only there may come by position here,
    because torch supports neither gradients nor vmap for keyword-only tensors.
    """

    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...]
    layout_setting: str | None = None
    """The setting that says the layout of a call that does not."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Other names of the function's arguments, and the arguments they name."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its arguments, in order."""
        return tuple(argument.name for argument in self.arguments)

    @cached_property
    def defaults(self) -> tuple[Any, ...]:
        """Their defaults; `None` where there is none."""
        return tuple(argument.default for argument in self.arguments)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """The places of its tensors."""
        return tuple(i for i, argument in enumerate(self.arguments) if argument.is_tensor)

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow through it."""
        return RULES[self.name].differentiable

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return "seed" in self.names

    @cached_property
    def schema(self) -> str:
        """Its declaration."""
        returns = "Tensor" if len(self.outputs) == 1 else f"({', '.join('Tensor' for _ in self.outputs)})"
        return f"{self.name}({', '.join(argument.declared() for argument in self.arguments)}) -> {returns}"

    @cached_property
    def backward_schema(self) -> str:
        """The declaration of its backward: gradients of the results, which tensors want one, then all arguments."""
        grads = [f"Tensor grad_{name}" for name in self.outputs]
        arguments = [*grads, "bool[] output_mask", *(argument.declared() for argument in self.arguments)]
        return f"{self.name}_backward({', '.join(arguments)}) -> Tensor[]"

    def fill(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments: torch leaves out trailing ones that are at their default."""
        return args + self.defaults[len(args) :]

    def values(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments by name. Flags at their default are left out: not every operation behind a function has them."""
        given = zip(self.names, self.defaults, args, strict=False)
        return {name: value for name, default, value in given if value is not default}

    def place(self, name: str) -> int:
        """Where an argument stands."""
        return self.names.index(name)


def _argument(declared: dict[str, Any], updates: list[str]) -> Argument:
    name, required, default = declared["name"], declared["required"], declared["default"]
    if declared["kind"] == "special":
        return Argument(name, _SPECIALS[name], required=False)
    if declared["type"] == "tensor":
        alias = f"({chr(ord('a') + updates.index(name))}!)" if name in updates else ""
        return Argument(name, f"Tensor{alias}" if required else f"Tensor{alias}?", required)
    optional = "?" if default is None and not required else ""
    return Argument(name, _TYPES[declared["type"]] + optional, required, default)


def _operator(function: dict[str, Any]) -> Operator:
    declared = [argument for argument in function["args"] if argument["name"] not in ("out", "return_lse")]
    arguments: list[Argument] = []
    for each in declared:
        argument = _argument(each, function["updates"])
        if argument.required and arguments and not arguments[-1].required:
            # torch wants arguments without a default to come first. A size that is left out is 0, which no tensor agrees with; a
            # tensor is missed where the call is read.
            kind, default = (f"{argument.type}?", None) if argument.is_tensor else (argument.type, 0)
            argument = Argument(argument.name, kind, required=False, default=default)
        arguments.append(argument)
    if RULES[function["name"]].differentiable and any(argument.name == "seed" for argument in arguments):
        # A backward must drop what the forward dropped, so the seed is drawn before both, and is part of a graph.
        arguments.append(Argument(SEED_TENSOR, "Tensor?", required=False))
    setting = function["layout_setting"]
    if RULES[function["name"]].differentiable and setting is not None:
        arguments.append(Argument(DEFAULT_LAYOUT, "str?", required=False))
    if function["name"] in LOWERABLE:
        arguments.append(Argument(LOWERING, "str?", required=False))
    outputs = tuple(output["name"] for output in function["outputs"])
    others = {other: argument["name"] for argument in function["args"] for other in argument["also"]}
    return Operator(function["name"], tuple(arguments), outputs, tuple(function["updates"]), setting, others)


OPERATORS: dict[str, Operator] = {function["name"]: _operator(function) for function in _native.functions()}
