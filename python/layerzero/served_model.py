"""The calls of a compiled model: which graph serves each, when the model is exported, and which calls run the model itself."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from layerzero import deciding
from layerzero.errors import ExportError, InvalidCallError, LayerZeroError, warn
from layerzero.graph_variants import How, Left, Session, StepFailedError, Variant
from layerzero.lifecycle import open_in_forks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from layerzero.call_arguments import Call
    from layerzero.generating import Decoder
    from layerzero.watched_weights import WatchedWeights

#: How many times a model is exported at most.
MOST_EXPORTS = 8
_SCATTERED = Left("other arguments", "a tensor that the model changes is not contiguous")


class ServedModel:
    """A model whose calls are served by graphs. A call that no graph fits gets a new one; if that fails, the model itself runs.

    Names of attributes begin with an underscore, even those that other files use: a :class:`CompiledModel` passes all other names on
    to the model.
    """

    def __init__(
        self,
        model: Any,
        *,
        dynamic_shapes: Any = None,
        tune: bool = False,
        off: Sequence[str] = (),
        strict: bool = False,
        weights: str | None = None,
        precision: str = "highest",
        share: Session | None = None,
    ) -> None:
        from layerzero.call_arguments import Signature, surroundings, wants_gradients

        # Kept as attributes: this module must not import torch, and a call should not repeat the import.
        self._surroundings, self._wants_gradients = surroundings, wants_gradients
        #: The model.
        self.model = model
        self._dynamic_shapes, self._strict = dynamic_shapes, strict
        self._how, self._share = How(tune, tuple(off), weights, precision), share
        self._lock = open_in_forks(threading.RLock())
        self._signature = Signature.of(model)
        self._variants: list[Variant] = []
        self._by_key: dict[tuple[Any, ...], Variant | Left] = {}
        self._calls, self._left = 0, Counter[str]()
        self._told: set[str] = set()
        self._decided: deciding.Plan | None = None
        self._decoder: Decoder | None = None
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._error: float | None = None
        self._watched: WatchedWeights | None = None
        #: Whether the caller passed a precision.
        self._precise = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        watched = self._watched
        if watched is not None and perf_counter() >= watched.next_look:
            self._look(watched)
        training = getattr(self.model, "training", False)
        if not kwargs and not training:
            for variant in self._variants:
                if variant.quick is not None and (found := variant.quick(args)) is not None:
                    self._calls += 1
                    return found
        plan, variants = self._decided, self._variants
        if plan is None and (why := "training mode" if training else self._surroundings(self._signature.device)):
            return self._left_to_model(Left(why), args, kwargs)
        # Another thread may call `refresh` meanwhile.
        while plan is None and not variants:
            self._prepare(args, kwargs)
            plan, variants = self._decided, self._variants
        if plan is not None:
            self._calls += 1
            return plan(*args, **kwargs)
        # The first call has found out where the model is.
        if (device := self._signature.device) is not None and (why := self._surroundings(device)):
            return self._left_to_model(Left(why), args, kwargs)
        call = self._signature.read(args, kwargs, variants[0].plain)
        if isinstance(call, str):
            return self._left_to_model(Left("other arguments", call), args, kwargs)
        if self._wants_gradients(call.flat):
            return self._left_to_model(Left("gradients", "an input needs gradients"), args, kwargs)
        found = self._by_key.get(call.key)
        if found is None:
            found = self._found(call, args, kwargs)
        if isinstance(found, Left):
            return self._left_to_model(found, args, kwargs)
        inputs = found.inputs(call)
        if found.written and not all(inputs[at].is_contiguous() for at in found.written):
            return self._left_to_model(_SCATTERED, args, kwargs)
        try:
            results = found.run(inputs)
        except StepFailedError as error:
            left = self._by_key[call.key] = Left("a step that failed", str(error))
            return self._left_to_model(left, args, kwargs)
        self._calls += 1
        return results

    def _look(self, watched: WatchedWeights) -> None:
        """Follows changed weights. Does nothing while another thread holds the lock, so that no call waits for an export."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if watched is not self._watched or not (how := watched.look()):
                return
            if how == "in place":
                anew: list[Variant] = []
                for one in self._variants:
                    anew.append(one.anew(anew[0].session if anew else None))
                self._variants = anew
                self._by_key.clear()
                self._decoder, self._error = None, None
            else:
                self._forget()
        finally:
            self._lock.release()
        if "weights" not in self._told:
            self._told.add("weights")
            warn(f"weights of {self._name} changed: they are compiled again. Call refresh() to use new weights at once")

    def _forget(self) -> None:
        """Discards the graphs and the packed weights. The next call exports the model again."""
        with self._lock:
            self._variants, self._decided = [], None
            self._signature.device = None
            self._decoder, self._error, self._watched = None, None, None
            self._by_key.clear()

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Exports the model for its first arguments."""
        from layerzero.call_arguments import tensors

        with self._lock:
            if self._variants or self._decided is not None:
                return
            where = {one.device for one in tensors((args, kwargs))}
            if (elsewhere := {one.type for one in where} - {"cpu"}) and not self._prepared_on(where, args, kwargs):
                self._decide(min(elsewhere), args, kwargs)
                return
            if not self._variants:
                self._variants = [self._exported(args, kwargs, self._dynamic_shapes)]
            self._example = args, kwargs

    def _prepared_on(self, where: set[torch.device], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Exports the model for one CUDA device. What cannot be exported there runs as it is, with its calls decided."""
        device = min(where, key=str)
        if len(where) > 1 or device.type != "cuda" or self._how.weights is not None:
            return False
        if unused := [name for name, given in (("tune", self._how.tune), ("precision", self._precise)) if given]:
            warn(f"{', '.join(unused)}: for graphs on the CPU only, without effect for inputs on {device}")
        try:
            variant = self._exported(args, kwargs, self._dynamic_shapes)
        except ExportError as error:
            if self._strict:
                raise
            warn(f"{self._name} is not a graph on {device}, only the kernels of its calls are decided: {error.message}")
            return False
        # Others may look for a graph as soon as there is one.
        self._signature.device = device
        self._variants = [variant]
        return True

    def _decide(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For inputs on a device without graphs: decides the kernels of the model's own LayerZero calls."""
        how = self._how
        if how.weights is not None or self._strict:
            given = "weights is for graphs on the CPU" if how.weights is not None else "strict is for graphs"
            raise InvalidCallError(
                f"{given}, and an input is on {device}",
                code="BAD_PARAM",
                hint="leave it out; there the kernels of the model's own LayerZero calls are decided once",
            )
        unused = [name for name, given in (("tune", how.tune), ("off", how.off), ("precision", self._precise)) if given]
        if self._dynamic_shapes is not None:
            unused.append("dynamic_shapes")
        if unused and device != "cuda":
            warn(f"{', '.join(unused)}: for graphs only, without effect for inputs on {device}")
        self._decided = deciding.decide(self.model, *args, **kwargs)

    def _exported(self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Variant:
        from layerzero.call_exports import export_call

        exported = export_call(
            self.model, self._signature, args, kwargs, dynamic_shapes=dynamic_shapes, strict=self._strict
        )
        if self._watched is not None:
            # Weights may have changed meanwhile: then their packed copies must not be shared.
            self._look(self._watched)
        example = exported.flatten(args, kwargs)
        exported = self._signature.normal(exported, args, kwargs)
        variant = Variant(exported, example, self._how, self._shared())
        self._watch([*self._variants, variant])
        return variant

    def _watch(self, variants: Sequence[Variant]) -> None:
        """Records the state of the weights, to notice changes."""
        from layerzero.watched_weights import WatchedWeights

        exports = [variant.exported for variant in variants]
        constants = [one for exported in exports for one in (*exported.constants, *exported.held)]
        changing = [one for variant in variants for one in variant.exported.buffers]
        self._watched = WatchedWeights(self.model, constants, changing)

    def _shared(self) -> Session | None:
        """The session whose packed weights a new session can use; None if there is none."""
        if self._variants:
            return self._variants[0].session
        return self._decoder.session if self._decoder is not None else self._share

    def _found(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | Left:
        """Which variant serves a call of a form that was not seen before, or why the model itself runs."""
        with self._lock:
            found = self._by_key.get(call.key)
            if found is None:
                if len(self._by_key) > 4096:
                    self._by_key.clear()
                found = self._serving(call, args, kwargs)
                self._by_key[call.key] = found
            return found

    def _serving(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | Left:
        """A variant that fits the call, else a new one in which the sizes that differ are symbols."""
        from layerzero.call_exports import open_sizes

        alike, why = False, ""
        for variant in self._variants:
            if other := variant.takes(call):
                why = why or other
            elif other := variant.fits(variant.inputs(call)):
                alike, why = True, other
            else:
                return variant
        kind = "sizes outside of what was exported" if alike else "arguments outside of what was exported"
        if self.model is None or (alike and self._dynamic_shapes is not None):
            return Left(kind, f"{why}, which it was not compiled for")
        if len(self._variants) >= MOST_EXPORTS:
            return Left(kind, f"{why}, and it was exported {MOST_EXPORTS} times")
        shapes = self._dynamic_shapes
        if shapes is None:
            shapes = open_sizes(self.model, self._signature, self._variants, call, args, kwargs)
        try:
            variant = self._exported(args, kwargs, shapes)
        except Exception:  # noqa: BLE001 - if sizes cannot be symbols, the model is exported for these numbers
            try:
                variant = self._exported(args, kwargs, None)
            except LayerZeroError as error:
                # The model may refuse the call too, with an error of its own.
                return Left(kind, error.message)
        self._variants = [*self._variants, variant]
        return variant

    def _left_to_model(self, why: Left, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._left[why.kind] += 1
        found = self.model(*args, **kwargs)
        if why.kind not in self._told:
            self._told.add(why.kind)
            warn(f"this call of {self._name} ran uncompiled: {why.detail or why.kind}")
        return found

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, list[Tensor]]:
        """The variant for some arguments, exported if need be, and its inputs. Nothing is run."""
        if not self._variants and self._decided is None and (args or kwargs):
            self._prepare(args, kwargs)
        if self._decided is not None:
            raise InvalidCallError(
                "there is no graph for where the inputs are: the kernels of the model's own calls were decided",
                code="WRONG_INPUT",
                hint="report() says what was decided",
            )
        if not self._variants:
            raise InvalidCallError(
                "nothing is compiled yet",
                code="NO_EXAMPLE_INPUTS",
                hint="call the compiled model once, or pass inputs: compiled.report(x)",
            )
        if not (args or kwargs):
            return self._variants[0], self._variants[0].example
        call = self._signature.read(args, kwargs, self._variants[0].plain)
        found = Left("other arguments", call) if isinstance(call, str) else self._found(call, args, kwargs)
        if isinstance(found, Left):
            raise InvalidCallError(
                f"a call with these inputs runs uncompiled: {found.detail}",
                code="WRONG_INPUT",
                hint="pass inputs it was compiled for",
            )
        assert not isinstance(call, str)
        return found, found.inputs(call)

    @property
    def _name(self) -> str:
        return type(self.model).__name__ if not inspect.isroutine(self.model) else str(self.model.__name__)
