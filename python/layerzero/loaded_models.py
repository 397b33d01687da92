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
    """A compiled model from a file that :meth:`CompiledModel.save` wrote. The model's code is not needed.

    The weights are mapped into memory. With ``verify``, all of them are read once and compared with their checksums.
    """
    from layerzero import saved_graphs

    loading.load()
    saved = saved_graphs.read(path, verify=verify)
    if saved.hardware != (here := devices.cpu_name()):
        warn(f"{path} was written on {saved.hardware}; its kernels are chosen anew for {here}")
    return LoadedModel.of(saved.model, saved.signature, saved.variant)


class LoadedModel(CompiledModel):
    """A compiled model from a file. It has no model to fall back to, so a call that its graph does not fit is an error."""

    #: The name of the model, from the file.
    _written: str = "LoadedModel"

    @classmethod
    def of(cls, name: str, signature: Signature, variant: Variant) -> LoadedModel:
        """The loaded model of a name, the signature of its model, and its graph."""
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
        """The same graph with the same weights, and copies of the buffers that it writes to."""
        before = self._variants[0]
        exported = replace(before.exported, buffers=[one.clone() for one in before.exported.buffers])
        variant = Variant(exported, before.example, before.how, before.session)
        copied = memo[id(self)] = LoadedModel.of(self._written, self._signature, variant)
        return copied

    def decoder(self) -> Decoder:
        """Raises an error: a plan file has no graph with a cache."""
        raise InvalidCallError(
            "a plan from a file cannot generate", code="WRONG_INPUT", hint="compile the model in this process"
        )

    def refresh(self) -> None:
        """Raises an error: there is no model to export again."""
        raise InvalidCallError("a plan from a file has no model", code="WRONG_INPUT", hint="compile the model again")
