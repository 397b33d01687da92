"""``lz.load_plan``: a compiled model from a file, without the model's code."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import devices, loading
from layerzero.compiled_model import CompiledModel
from layerzero.errors import InvalidCallError, warn
from layerzero.graph_variants import Left, Variant

if TYPE_CHECKING:
    from layerzero.call_arguments import Signature
    from layerzero.generating import Decoder


def load_plan(path: str | Path, *, verify: bool = True) -> CompiledModel:
    """A compiled model that :meth:`CompiledModel.save` wrote. The model's own code is not needed.

    Weights are mapped from the file. ``verify`` compares them with their checksums, which reads all of them once.
    """
    from layerzero import saved_graphs

    loading.load()
    saved = saved_graphs.read(path, verify=verify)
    if saved.hardware != (here := devices.cpu_name()):
        warn(f"{path} was written on {saved.hardware}; its kernels are chosen anew for {here}")
    return LoadedModel.of(saved.model, saved.signature, saved.variant)


class LoadedModel(CompiledModel):
    """A compiled model from a file. It has no model to fall back to: other sizes than those it was exported for are an error."""

    #: What the file says the model is called.
    _written: str = "LoadedModel"

    @classmethod
    def of(cls, name: str, signature: Signature, variant: Variant) -> LoadedModel:
        """A graph, what its model was called, and the parameters of that."""
        loaded = cls(None, dynamic_shapes=(), **asdict(variant.how))
        loaded._variants, loaded._written, loaded._signature = [variant], name, signature
        return loaded

    @property
    def _name(self) -> str:
        return self._written

    def _left_to_model(self, why: Left, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise InvalidCallError(
            f"this plan cannot serve the call: {why.detail or why.kind}",
            code="WRONG_INPUT",
            hint="compile the model for these inputs, and save it again",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """The same graph with the same weights; what the model changes is its own."""
        before = self._variants[0]
        exported = replace(before.exported, buffers=[one.clone() for one in before.exported.buffers])
        variant = Variant(exported, before.example, before.how, before.session)
        copied = memo[id(self)] = LoadedModel.of(self._written, self._signature, variant)
        return copied

    def decoder(self) -> Decoder:
        """Not for models from files, which have no graph for it."""
        raise InvalidCallError(
            "a plan from a file cannot generate", code="WRONG_INPUT", hint="compile the model in this process"
        )

    def refresh(self) -> None:
        """Not for models from files: their weights are in the file."""
        raise InvalidCallError("a plan from a file has no model", code="WRONG_INPUT", hint="compile the model again")
