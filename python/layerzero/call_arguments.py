"""The arguments of a call of a compiled model, in the same order whether they are passed by position or by name.

The *key* of a call says which graph serves it: the nesting of the arguments, the dtype and sizes of each tensor, and the type and
value of everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from layerzero.torch_state import recorder

if TYPE_CHECKING:
    from layerzero.export import Exported

#: Types of arguments that become constants of a graph.
CONSTANTS = (int, float, bool, str, type(None))
#: How many orders and nestings of arguments are kept.
_MOST_ORDERS = 256


def constant_key(one: Any) -> tuple[type, Any]:
    """Equal for two constants that a model cannot distinguish: of the same type, and of the same value to the bit."""
    # 0.0 equals -0.0, and NaN does not equal itself.
    return type(one), repr(one) if isinstance(one, float) else one


class _UnfitError(Exception):
    """An argument that no graph takes. The message says why."""


class Call(NamedTuple):
    """The arguments of a call."""

    #: Tensors and constants, flattened.
    flat: Sequence[Any]
    #: How they are nested.
    spec: Any
    #: The key by which a graph is chosen.
    key: tuple[Any, ...]


def surroundings(device: torch.device | None = None) -> str:
    """A mode that is active around a call on a device (without one, the CPU) and that only torch's own functions follow; ``""`` if none
    is."""
    if torch.is_autocast_enabled("cpu" if device is None else device.type):
        return "autocast"
    if (who := recorder()) is not None:
        return who
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    return "a dispatch mode" if torch._C._len_torch_dispatch_stack() else ""


def wants_gradients(flat: Sequence[Any]) -> bool:
    """Whether gradients are enabled and one of the arguments requires them."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in flat if isinstance(one, torch.Tensor))


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results."""
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


class Signature:
    """The parameters of a model, which define the order of the arguments."""

    def __init__(self, signature: inspect.Signature | None) -> None:
        self._signature = signature
        self._orders: dict[tuple[int, tuple[str, ...]], tuple[list[str], list[str]]] = {}
        self._specs: list[Any] = []
        #: The device that tensors have to be on; without one the CPU.
        self.device: torch.device | None = None

    @classmethod
    def of(cls, model: Any) -> Signature:
        """The signature of a module or a function. Built-in functions have none: their arguments stay as they are."""
        function = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            return cls(inspect.signature(function))
        except (TypeError, ValueError):
            return cls(None)

    @classmethod
    def loads(cls, rows: Any) -> Signature:
        """A signature that :meth:`dumps` wrote. Every parameter is optional."""
        if rows is None:
            return cls(None)
        kinds = {kind.name: kind for kind in inspect._ParameterKind}
        parameters = []
        for name, kind in rows:
            default = inspect.Parameter.empty if kind.startswith("VAR_") else None
            parameters.append(inspect.Parameter(str(name), kinds[kind], default=default))
        return cls(inspect.Signature(parameters))

    def dumps(self) -> list[list[str]] | None:
        """Names and kinds of the parameters, as data."""
        if self._signature is None:
            return None
        return [[name, one.kind.name] for name, one in self._signature.parameters.items()]

    @property
    def parameters(self) -> list[str]:
        """The names that arguments can be given by."""
        rows = self._signature.parameters.values() if self._signature is not None else ()
        return [one.name for one in rows if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    def of_method(self, names: Sequence[str]) -> inspect.Signature:
        """The signature of a method with these parameters, and a keyword parameter for each name that has none."""
        kinds = inspect.Parameter
        of_self = [kinds("self", kinds.POSITIONAL_ONLY)]
        if self._signature is None:
            own = [kinds("args", kinds.VAR_POSITIONAL)]
        else:
            own = [one for one in self._signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        known = self.parameters
        return inspect.Signature(
            [*of_self, *own, *(kinds(name, kinds.KEYWORD_ONLY) for name in names if name not in known)]
        )

    def arranged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position up to the first one that is left out, the others by name in a fixed order."""
        if not kwargs or self._signature is None:
            return tuple(args), dict(kwargs)
        form = len(args), tuple(kwargs)
        order = self._orders.get(form)
        if order is None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            order = self._orders[form] = self._order(*form)
        behind, named = order
        return (*args, *[kwargs[name] for name in behind]), {name: kwargs[name] for name in named}

    def _order(self, positional: int, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Which named arguments become positions, and the order of the others."""
        assert self._signature is not None
        try:
            bound = self._signature.bind(*[None] * positional, **{name: name for name in names})
        except TypeError:
            # The model raises the error.
            return [], list(names)
        places = {name: at for at, name in enumerate(self._signature.parameters)}
        named = sorted(bound.kwargs, key=lambda name: (places.get(name, len(places)), name))
        return list(bound.args[positional:]), named

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Any = None) -> Call | str:
        """The call, or why no graph takes it: an argument is neither a plain tensor nor a number, a text or ``None``.

        `plain` is `Variant.plain`. A call with just so many positional tensors need not be flattened.
        """
        try:
            return self._read(args, kwargs, plain)
        except _UnfitError as error:
            return str(error)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Any) -> Call:
        if plain is not None and not kwargs and len(args) == plain[0]:
            key = tuple(
                [(one.dtype, one.shape) for one in args if type(one) in _PLAIN and self._here(one) and _is_dense(one)]
            )
            if len(key) == plain[0]:
                return Call(args, plain[1], (self._number(plain[1]), *key))
        flat, spec = pytree.tree_flatten(self.arranged(args, kwargs))
        return Call(flat, spec, (self._number(spec), *map(self._kind, flat)))

    def _here(self, one: torch.Tensor) -> bool:
        return one.is_cpu if self.device is None else one.device == self.device

    def _kind(self, one: Any) -> tuple[Any, ...]:
        """The part of the key for an argument: dtype and sizes of a tensor, type and value of a constant."""
        if isinstance(one, torch.Tensor):
            if type(one) in _PLAIN and self._here(one) and _is_dense(one):
                return one.dtype, one.shape
            if type(one) not in _PLAIN:
                raise _UnfitError(f"an argument is a {type(one).__name__}, a graph takes plain tensors")
            if one.layout is not torch.strided:
                raise _UnfitError(
                    f"an argument is a {one.layout} tensor, a graph takes dense ones: sparse ones are the model's"
                )
            if not self._here(one):
                raise _UnfitError(f"an argument is on {one.device}, the graph is for {self.device or 'the CPU'}")
            raise _UnfitError("an argument is complex, a graph holds real numbers")
        if isinstance(one, CONSTANTS):
            return constant_key(one)
        raise _UnfitError(f"an argument is a {type(one).__name__}, a graph takes tensors, numbers, texts and None")

    def _number(self, spec: Any) -> int:
        """A number for a nesting: equal nestings have the same number."""
        for at, known in enumerate(self._specs):
            if known is spec or known == spec:
                return at
        if len(self._specs) >= _MOST_ORDERS:
            raise _UnfitError(f"arguments were nested in {_MOST_ORDERS} other ways before")
        self._specs.append(spec)
        return len(self._specs) - 1

    def places(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """For each flattened argument in the fixed order: its index among the flattened arguments as they were passed."""
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        numbered, named = pytree.tree_unflatten(list(range(len(flat))), spec)
        return [*pytree.tree_leaves(self.arranged(numbered, named))]

    def normal(self, exported: Exported, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
        """An export for this call that takes the arguments in the fixed order."""
        if not kwargs:
            return exported
        now = {before: at for at, before in enumerate(self.places(args, kwargs))}
        return replace(
            exported,
            in_spec=pytree.tree_flatten(self.arranged(args, kwargs))[1],
            taken=[now[at] for at in exported.taken],
            fixed={now[at]: value for at, value in exported.fixed.items()},
        )


class _Leaf:
    def __repr__(self) -> str:
        return "·"


def nesting(spec: Any) -> str:
    """The nesting of arguments as text, in which each argument is a dot."""
    try:
        args, kwargs = pytree.tree_unflatten([_Leaf()] * spec.num_leaves, spec)
        return ", ".join([*map(repr, args), *(f"{name}={one!r}" for name, one in kwargs.items())]) or "none"
    except Exception:  # noqa: BLE001 - a class of another library, which may not take dots
        return f"{spec.num_leaves} in all"


_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])
_STRIDED = torch.strided


def _is_dense(one: torch.Tensor) -> bool:
    return one.layout is _STRIDED and not one.dtype.is_complex
