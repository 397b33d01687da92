"""What a captured step of a model depends on besides its arguments: modules, addresses of weights, switches, hooks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelParts"]

#: Attributes by which modules of PEFT switch adapters.
_SWITCHES = ("_disable_adapters", "_active_adapter", "scaling")


class ModelParts:
    """A model's modules and weights, looked at before every step. It does not keep the model alive.

    An attribute of a module that its own code reads, and that is not named here, is not seen: a graph keeps what it was
    when the step was captured.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._look()
        self._seen = self._now()

    def _look(self) -> None:
        model = self._model()
        parts = [] if model is None else list(model.modules())
        self._children = [part._modules for part in parts if part._modules]
        self._owners = [held for part in parts for held in (part._parameters, part._buffers) if held]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        # Not those of the model itself, whose `forward` would keep it alive.
        self._attributes = [vars(part) for part in parts[1:]]
        self._switched = [held for held in self._attributes if any(name in held for name in _SWITCHES)]

    def _now(self) -> list[Any]:
        found: list[Any] = [x.data_ptr() for held in self._owners for x in held.values() if x is not None]
        found += [id(child) for held in self._children for child in held.values()]
        found += [held["training"] for held in self._attributes]
        found += [id(held.get("forward")) for held in self._attributes]
        found += [repr(held.get(name)) for held in self._switched for name in _SWITCHES]
        return found

    def changed(self) -> bool:
        """Whether they are others than when this was asked last, or elsewhere."""
        if self._seen == self._now():
            return False
        self._look()
        self._seen = self._now()
        return True

    def hooked(self) -> bool:
        """Whether somebody wants Python to run in the middle of a step."""
        from torch.nn.modules import module as torchs

        return any(self._hooks) or bool(torchs._global_forward_hooks or torchs._global_forward_pre_hooks)
