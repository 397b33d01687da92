"""Whole steps of a model as CUDA graphs, for `lz.optimize(model, cuda_graphs=True)`.

A step of one token launches hundreds of small kernels, and Python takes longer to launch them than the device to run them.
A CUDA graph launches all of them at once. The first two calls of a kind run as they always did. From the third on, a call
copies its tensors to where the graph reads them, replays the graph, and returns copies of its results.

Two calls are of one kind if their tensors have the same shapes and dtypes, everything else they were given is equal, and
what is in force around them (autocast, policy, …) is the same. A graph reads fixed addresses, so it also belongs to one
cache, one stream and the weights where they are now.

The first replay of a kind is compared with the step without a graph. What cannot be captured, or differs, stays as it was;
:attr:`StepGraphs.refused` says why.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layerzero import fingerprints, torch_state
from layerzero.graphs import CudaGraphs, Graphs
from layerzero.integrations.models import replacing, static_caches
from layerzero.integrations.models.model_parts import ModelParts
from layerzero.integrations.models.static_caches import UnfitError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["StepGraphs"]

#: Calls of a kind that run as they are, before one is captured.
_WARM_CALLS = 2
#: Rows of the first tensor (batch times tokens) up to which Python may take longer than the device.
_MOST_ROWS = 1024
#: Graphs that are kept, and kinds of calls that are counted.
_MOST_GRAPHS = 64
_MOST_KINDS = 1024
#: Graphs of a kind that may be captured in a row without being replayed.
_MOST_UNUSED = 3
#: How far a replay may be from the step without a graph, relative to the largest number of the result. Captured calls may
#: use other kernels, so that results of half precision differ in their last bits.
_CLOSE = 0.05


class _Graph:
    """A captured step: where it reads, what replays it, where its results are. It does not hold the caches."""

    def __init__(self, graphs: Graphs, run: Callable[..., Any], given: static_caches.Given) -> None:
        """Captures a step. What Python counts has moved on by one step then, and the device's memory has not."""
        self._inputs = [tensor.clone() for tensor in given.tensors]
        args, kwargs = given.over(self._inputs)
        before = given.state().counts()
        self.replays = 0
        with static_caches.capturable(given.caches) as end, _without_cached_casts():

            def step() -> static_caches.Results:
                results = given.results(run(*args, **kwargs))
                end()
                return results

            self._replay, self._results = graphs.capture(step)
        self._steps = [now - then for now, then in zip(given.state().counts(), before, strict=True)]

    def replay(self, given: static_caches.Given, count: bool = True) -> Any:
        """A step with these arguments; ``count`` it in the caches, unless Python has done so."""
        for mine, tensor in zip(self._inputs, given.tensors, strict=True):
            mine.copy_(tensor)
        self._replay()
        if count:
            given.state().advance(self._steps)
        return self._results.copied(given.caches)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Has autocast cast weights anew: a graph must not read copies that it keeps until the end of the block around the call."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class StepGraphs:
    """The graphs of one model's steps."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], make: Callable[[], Graphs] | None = None) -> None:
        #: Steps that were captured, replayed, and run as they are.
        self.captured, self.replayed, self.eager = 0, 0, 0
        #: Why calls are never captured, and how many were made.
        self.refused: dict[str, int] = {}
        self._forward, self._make = forward, make
        self._device = next(model.parameters()).device
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        #: How often a kind of call was made; a text: why it is never captured.
        self._kinds: OrderedDict[Hashable, int | str] = OrderedDict()
        self._places: dict[int, tuple[Any, Graphs]] = {}
        self._parts = ModelParts(model)
        #: Of each kind, the graph captured last, and how many before it were never replayed.
        self._last: dict[Hashable, tuple[_Graph, int]] = {}
        self._lock = threading.Lock()
        #: The thread that makes a step: a model may call itself.
        self._busy: int | None = None
        fingerprints.begin()

    def __repr__(self) -> str:
        said = f"{self.captured} captured, {self.replayed} replayed, {self.eager} without a graph"
        return f"<StepGraphs: {said}{''.join(f'; {why}: {count}' for why, count in self.refused.items())}>"

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One step."""
        import torch

        run = functools.partial(self._forward, model)
        if torch.is_grad_enabled() or model.training or self._is_watched() or self._busy == threading.get_ident():
            return run(*args, **kwargs)
        try:
            given = static_caches.Given(args, kwargs)
            kind = self._kind(given)
        except UnfitError as unfit:
            if unfit.lasting:
                self.refused[str(unfit)] = self.refused.get(str(unfit), 0) + 1
            self.eager += 1
            with real_masks():
                return run(*args, **kwargs)
        with self._lock:
            self._busy = threading.get_ident()
            try:
                return self._step(run, given, kind)
            finally:
                self._busy = None

    def clear(self) -> None:
        """Frees all graphs."""
        self._graphs.clear()
        self._kinds.clear()
        self._last.clear()
        self._places.clear()

    def _step(self, run: Callable[..., Any], given: static_caches.Given, kind: Hashable) -> Any:
        if self._parts.changed():
            self._graphs.clear()
            self._kinds.clear()
            self._last.clear()
        key = (kind, given.addresses())
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            self.replayed += 1
            graph.replays += 1
            return graph.replay(given)
        seen = self._kinds.pop(kind, 0)
        self._kinds[kind] = seen if isinstance(seen, str) else seen + 1
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        if isinstance(seen, str):
            self.refused[seen] = self.refused.get(seen, 0) + 1
        if isinstance(seen, str) or seen < _WARM_CALLS:
            self.eager += 1
            with real_masks():
                # The second time, kernels that a capture would choose are compiled.
                if seen == _WARM_CALLS - 1:
                    return self._prepared(run, given, kind)
                return run(*given.args, **given.kwargs)
        last, unused = self._last.get(kind, (None, 0))
        if last is not None and last.replays == 0 and unused >= _MOST_UNUSED:
            return self._refuse(kind, "the cache moves between steps, as for beam search", run, given)
        return self._capture(run, given, kind, key, proven=seen > _WARM_CALLS)

    def _refuse(self, kind: Hashable, why: str, run: Callable[..., Any], given: static_caches.Given) -> Any:
        """The step as it is; this kind of step is never captured."""
        self._kinds[kind] = why
        self.refused[why] = self.refused.get(why, 0) + 1
        self.eager += 1
        with real_masks():
            return run(*given.args, **given.kwargs)

    def _prepared(self, run: Callable[..., Any], given: static_caches.Given, kind: Hashable) -> Any:
        """The step as it is; its calls are made ready for a capture."""
        from layerzero.graph_capture import capture

        done, result = False, None
        try:
            with capture(self._place()[0]):
                result = run(*given.args, **given.kwargs)
                done = True
        except Exception as error:
            if not done:
                raise
            # The step was made. A kernel of it may not be captured.
            self._kinds[kind] = f"the step cannot be captured: {_first_line(error)}"
        return result

    def _capture(
        self, run: Callable[..., Any], given: static_caches.Given, kind: Hashable, key: Hashable, proven: bool
    ) -> Any:
        """This step by a new graph. The first of its kind is compared with the step without one."""
        state = given.state()
        saved = state.save()
        want, why = None, None
        try:
            if not proven:
                before = [tensor.clone() for tensor in given.tensors]
                with real_masks():
                    want = run(*given.args, **given.kwargs)
                state.restore(saved)
                if not all(map(_same, before, given.tensors)):
                    for tensor, copy in zip(given.tensors, before, strict=True):
                        tensor.copy_(copy)
                    why = "the step writes to one of its arguments"
            if why is None:
                with real_masks():
                    graph = _Graph(self._place()[1], run, given)
                got = graph.replay(given, count=False)
                why = None if proven else _difference(got, want)
        except Exception as error:  # noqa: BLE001 - whatever a capture raises, the step can be made without one
            why = f"the step cannot be captured: {_first_line(error)}"
        if why is not None:
            # What a wrong replay wrote to a cache is written again.
            state.restore(saved)
            return self._refuse(kind, why, run, given)
        self.captured += 1
        last, unused = self._last.get(kind, (None, 0))
        self._last[kind] = graph, unused + 1 if last is not None and last.replays == 0 else 0
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        for cache in given.caches:
            # Its memory goes with it, and a graph that reads it must not run any more.
            weakref.finalize(cache, _forget, weakref.ref(self), key).atexit = False
        return got

    def _kind(self, given: static_caches.Given) -> Hashable:
        """What calls that may share a graph have in common. Raises `UnfitError` where there is none for them."""
        import torch

        tensors = given.tensors
        if not tensors:
            raise UnfitError("a call without tensors")
        rows = tensors[0].shape[:2].numel()
        if self._parts.hooked():
            raise UnfitError("a forward hook is registered, which a graph would leave out")
        if rows > _MOST_ROWS:
            raise UnfitError(f"more than {_MOST_ROWS} rows: the device takes longer than Python")
        for tensor in tensors:
            if tensor.device != self._device or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise UnfitError(f"a {type(tensor).__name__} on {tensor.device}")
        device = self._device.type
        around = (
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch_state.sdpa_choice(),
            fingerprints.policy(),
            self._stream(),
        )
        return given.form(), around

    def _is_watched(self) -> bool:
        """Whether somebody captures, traces or transforms this call, and would see nothing of a replay."""
        import torch

        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        within = torch._C._functorch.peek_interpreter_stack() is not None
        return within or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0

    def _stream(self) -> int:
        import torch

        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def _place(self) -> tuple[Any, Graphs]:
        """The stream that steps of the current stream are captured on, and what captures there. Its graphs share memory,
        which is safe because they run one after the other and their results are copied."""
        import torch

        known = self._places.get(self._stream())
        if known is None:
            if self._make is not None:
                known = None, self._make()
            else:
                side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                pool = torch.cuda.graph_pool_handle()
                known = side, CudaGraphs(self._device.index, side, pool)
            self._places[self._stream()] = known
        return known


def _forget(graphs: weakref.ref[StepGraphs], key: Hashable) -> None:
    """Deletes the graph of a cache that no longer exists."""
    if (found := graphs()) is not None:
        found._graphs.pop(key, None)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(a, b) or bool((a == b).logical_or_(a.isnan() & b.isnan()).all())


@contextmanager
def real_masks() -> Iterator[None]:
    """Has masks made in a block be tensors, which a graph can read again, instead of numbers."""
    import sys

    masks = sys.modules.get("layerzero.integrations._transformers.masks")
    if masks is None:
        yield
        return
    with masks.stored():
        yield


def _difference(got: Any, want: Any) -> str | None:
    """Why the results of a replay are not those of the step; `None` where they are."""
    import torch

    pairs = zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, want)), strict=True)
    for mine, theirs in pairs:
        if not isinstance(mine, torch.Tensor):
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return "the replayed step gives other shapes"
        if not mine.is_floating_point():
            if not torch.equal(mine, theirs):
                return "the replayed step gives another result"
            continue
        if mine.numel() == 0:
            continue
        a, b = mine.float(), theirs.float()
        usual = a.isfinite() & b.isfinite()
        if not _same(a[~usual], b[~usual]):
            return "the replayed step gives other infinities or NaN"
        largest = b[usual].abs().max().clamp_min(1e-6) if bool(usual.any()) else 1.0
        apart = float((a[usual] - b[usual]).abs().max() / largest) if bool(usual.any()) else 0.0
        if apart > _CLOSE:
            return f"the replayed step differs by {apart:.2g} of the largest number"
    return None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]


#: By model. A copy of a model has none, and runs its steps as they are.
_of_model: weakref.WeakKeyDictionary[nn.Module, StepGraphs] = weakref.WeakKeyDictionary()


def start(model: nn.Module, make: Callable[[], Graphs] | None = None) -> StepGraphs:
    """Has the steps of a model replayed as graphs. Once is enough: of a model whose steps are, the same graphs."""
    import torch

    if (known := _of_model.get(model)) is not None:
        return known
    inner = model.forward.__func__  # type: ignore[attr-defined]
    graphs = _of_model[model] = StepGraphs(model, inner, make)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (found := _of_model.get(self)) is None:
            return inner(self, *args, **kwargs)
        return found.call(self, args, kwargs)

    replacing.bind(model, forward)
    return graphs


def active() -> bool:
    """Whether there is a model whose steps are replayed."""
    return bool(_of_model)


def of(model: nn.Module) -> StepGraphs | None:
    """The graphs of a model's steps, if they are replayed."""
    return _of_model.get(model)


def stop(model: nn.Module, before: Any) -> None:
    """The forward that a model had before, and no graphs."""
    if (graphs := _of_model.pop(model, None)) is not None:
        graphs.clear()
    replacing.unbind(model)
    if before is not None:
        model.__dict__["forward"] = before
