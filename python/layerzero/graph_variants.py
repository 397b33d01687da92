"""A variant of a model: its export for some sizes, which calls fit it, and why a call runs the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from layerzero import _native, device_graphs

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.call_arguments import Call
    from layerzero.device_graphs.session import DeviceSession
    from layerzero.export import Exported

#: What runs graphs: native code on the CPU, the kernels of a device elsewhere.
Session: TypeAlias = "_native.Session | DeviceSession"


@dataclass(frozen=True)
class How:
    """Options of :func:`layerzero.compile` that every variant of a model shares."""

    tune: bool = False
    off: tuple[str, ...] = ()
    weights: str | None = None
    precision: str = "highest"


class Variant:
    """A model exported for some sizes or ranges of sizes, and for the values of its arguments that are not tensors."""

    def __init__(self, exported: Exported, example: Sequence[Tensor], how: How, share: Session | None = None) -> None:
        import torch

        self.exported, self.how = exported, how
        #: Where it runs.
        self.device = next((one.device for one in (*example, *exported.held)), torch.device("cpu"))
        # What passes read, they read on the host.
        constants = [one.cpu() for one in exported.constants]
        self.graph = _native.Graph.from_document(exported.document, constants)
        self.session = self._session(share)
        self.host = exported.host_calls if len(exported.host_calls) else None
        updated = set(self.graph.updates)
        #: The indices of inputs that the graph writes to.
        self.written = [at for at, (name, _, _) in enumerate(self.graph.inputs) if name in updated]
        #: The inputs it was exported for. `explain()` without arguments is about these.
        self.example = list(example)
        if not isinstance(self.session, _native.Session):
            self.session.prepare(self.example)
        positional, named = _parts(exported.in_spec)
        plain = exported.taken == list(range(positional.num_leaves)) and named.num_leaves == 0
        plain = plain and all(part.is_leaf() for part in _parts(positional))
        #: The number of arguments and their nesting, if all of them are positional tensors; else `None`.
        self.plain = (len(exported.taken), exported.in_spec) if plain else None
        self.single = exported.given == [(0, None)] and exported.out_spec.is_leaf()
        #: The native function of the whole call, or `None` if the call needs Python.
        self.quick = None
        if isinstance(self.session, _native.Session) and plain and self.single and self.host is None:
            self.quick = self.session.quick

    def _session(self, share: Session | None) -> Session:
        if device_graphs.serves(self.device):
            from layerzero.device_graphs.session import DeviceSession

            held = len(self.exported.buffers) + len(self.exported.held)
            return DeviceSession(self.graph, self.device, off=self.how.off, held=held, host=self.exported.host_calls)
        import torch

        return _native.Session(
            self.graph,
            threads=torch.get_num_threads(),
            off=list(self.how.off),
            tune=self.how.tune,
            weights=self.how.weights or "float32",
            precision=self.how.precision,
            share=share if isinstance(share, _native.Session) else None,
        )

    def anew(self, share: Session | None) -> Variant:
        """The same variant after its weights changed in place: they are packed again."""
        return Variant(self.exported, self.example, self.how, share)

    def inputs(self, call: Call) -> list[Tensor]:
        """The inputs of the graph, from the arguments of a call that fits."""
        return [*[call.flat[at] for at in self.exported.taken], *self.exported.buffers, *self.exported.held]

    def run(self, inputs: list[Tensor]) -> Any:
        """Runs the graph."""
        results = self.session.run(inputs, self.host)
        return results[0] if self.single else self.exported.unflatten(results)

    def copied(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs with copies of those that the graph writes to, so that a run leaves the caller's tensors alone."""
        import torch

        # Kernels of a device take any strides.
        native = isinstance(self.session, _native.Session)
        lying = torch.contiguous_format if native else torch.preserve_format
        found = list(inputs)
        for at in self.written:
            found[at] = found[at].clone(memory_format=lying)
        return found

    def laid(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as a plan needs them: those that the graph writes to are contiguous. They are not run."""
        found = list(inputs)
        if isinstance(self.session, _native.Session):
            for at in self.written:
                found[at] = found[at].contiguous()
        return found

    def serves(self, other: Variant) -> bool:
        """Whether it fits the call that another variant was exported for."""
        from layerzero.call_arguments import constant_key

        mine, theirs = self.exported, other.exported
        alike = (
            mine.in_spec == theirs.in_spec and mine.taken == theirs.taken and mine.fixed.keys() == theirs.fixed.keys()
        )
        same = all(constant_key(value) == constant_key(theirs.fixed.get(at)) for at, value in mine.fixed.items())
        return alike and same and not self.fits(other.example)

    def takes(self, call: Call) -> str:
        """Why the nesting or the constants of a call do not fit; ``""`` if they do. Sizes are not checked."""
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
        """Why the dtypes or sizes of inputs do not fit; ``""`` if they do."""
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


class StepFailedError(Exception):
    """A step failed in the first run of a graph on a device: the model itself serves such calls."""


@dataclass(frozen=True)
class Left:
    """Why calls run the model itself."""

    #: The kind that `report().model_calls` counts them as.
    kind: str
    #: The reason in the warning about the first one.
    detail: str = ""


def outline(tensor: Tensor) -> str:
    """The dtype and the sizes of a tensor: ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _parts(spec: Any) -> list[Any]:
    """The children of a nested structure: a method from torch 2.10 on, an attribute before."""
    found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return found
