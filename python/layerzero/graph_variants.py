"""A model exported for some sizes: its session, which arguments and sizes it takes, and why a call is left to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero import _native

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.call_arguments import Call
    from layerzero.export import Exported


@dataclass(frozen=True)
class How:
    """How graphs are compiled."""

    tune: bool = False
    off: tuple[str, ...] = ()
    weights: str | None = None
    precision: str = "highest"


class Variant:
    """A model exported for some sizes, or ranges of them, and for the values of its arguments that are no tensors."""

    def __init__(
        self, exported: Exported, example: Sequence[Tensor], how: How, share: _native.Session | None = None
    ) -> None:
        import torch

        self.exported, self.how = exported, how
        self.graph = _native.Graph.from_document(exported.document, exported.constants)
        self.session = _native.Session(
            self.graph,
            threads=torch.get_num_threads(),
            off=list(how.off),
            tune=how.tune,
            weights=how.weights or "float32",
            precision=how.precision,
            share=share,
        )
        self.host = exported.host_calls if len(exported.host_calls) else None
        updated = set(self.graph.updates)
        #: Which inputs are written in their places.
        self.written = [at for at, (name, _, _) in enumerate(self.graph.inputs) if name in updated]
        #: Inputs of the sizes it was first made for: what `steps` shows without others.
        self.example = list(example)
        positional, named = _parts(exported.in_spec)
        plain = exported.taken == list(range(positional.num_leaves)) and named.num_leaves == 0
        plain = plain and all(part.is_leaf() for part in _parts(positional))
        #: How many arguments there are and how they are nested, where all are tensors by position.
        self.plain = (len(exported.taken), exported.in_spec) if plain else None
        self.single = exported.given == [(0, None)] and exported.out_spec.is_leaf()
        #: A call in native code alone, or nothing where it cannot be one.
        self.quick = self.session.quick if plain and self.single and self.host is None else None

    def anew(self, share: _native.Session | None) -> Variant:
        """The same with weights read again, where they lie as they did."""
        return Variant(self.exported, self.example, self.how, share)

    def inputs(self, call: Call) -> list[Tensor]:
        """The inputs of the graph, from the arguments of a call that it takes."""
        return [*[call.flat[at] for at in self.exported.taken], *self.exported.buffers]

    def run(self, inputs: list[Tensor]) -> Any:
        """A call."""
        results = self.session.run(inputs, self.host)
        return results[0] if self.single else self.exported.unflatten(results)

    def copied(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs of which a run changes nothing but copies."""
        import torch

        found = list(inputs)
        for at in self.written:
            found[at] = found[at].clone(memory_format=torch.contiguous_format)
        return found

    def laid(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs as a plan is made for them, which is not run."""
        found = list(inputs)
        for at in self.written:
            found[at] = found[at].contiguous()
        return found

    def serves(self, other: Variant) -> bool:
        """Whether it serves the first call of another export."""
        from layerzero.call_arguments import constant_key

        mine, theirs = self.exported, other.exported
        alike = (
            mine.in_spec == theirs.in_spec and mine.taken == theirs.taken and mine.fixed.keys() == theirs.fixed.keys()
        )
        same = all(constant_key(value) == constant_key(theirs.fixed.get(at)) for at, value in mine.fixed.items())
        return alike and same and not self.fits(other.example)

    def takes(self, call: Call) -> str:
        """Why it cannot serve arguments of this nesting and these values; nothing if it can, for some sizes."""
        from layerzero.call_arguments import nesting

        if call.spec != self.exported.in_spec:
            return (
                f"other arguments: the graph is for {nesting(self.exported.in_spec)}, the call has {nesting(call.spec)}"
            )
        names = [name for name, _, _ in self.graph.inputs]
        for at, name in zip(self.exported.taken, names, strict=False):
            if not hasattr(call.flat[at], "shape"):
                return f"'{name}' is a {type(call.flat[at]).__name__}, the graph takes a tensor"
        return self.exported.differing(call.flat)

    def fits(self, inputs: Sequence[Tensor]) -> str:
        """Why it cannot serve inputs of these sizes; nothing if it can."""
        symbols: dict[str, int] = {}
        for tensor, (name, dtype, shape) in zip(inputs, self.graph.inputs, strict=True):
            if str(tensor.dtype) != f"torch.{dtype}" or tensor.dim() != len(shape):
                return f"'{name}' is {outline(tensor)}, the graph takes {dtype}[{', '.join(map(str, shape))}]"
            for size, wanted in zip(tensor.shape, shape, strict=True):
                if isinstance(wanted, int):
                    if size != wanted:
                        return f"'{name}' has a size of {size} where the graph has {wanted}"
                elif wanted.isidentifier() and symbols.setdefault(wanted, size) != size:
                    return f"'{name}' has a size of {size} where another is {symbols[wanted]}"
        for name, least, most in self.graph.symbols:
            if name in symbols and not least <= symbols[name] <= (most or symbols[name]):
                return f"a size is {symbols[name]}, exported for {least} to {most}"
        violated = self.exported.violated(symbols)
        return f"{violated[0]} does not hold" if violated else ""


@dataclass(frozen=True)
class Left:
    """Why calls are left to the model."""

    #: What they are counted as.
    kind: str
    #: What is said of the first one.
    detail: str = ""


def outline(tensor: Tensor) -> str:
    """Its element type and sizes: ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _parts(spec: Any) -> list[Any]:
    """What a nested structure holds, as torch 2.10 and later tell it."""
    found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return found
