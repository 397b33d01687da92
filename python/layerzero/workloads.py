"""Calls and how often each is made: a :class:`Workload`; those of a model, in prefill and in decode, are traced without
weights."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, get_args, overload

from layerzero import models
from layerzero.errors import ConfigurationError, InvalidCallError, LayerZeroError
from layerzero.inspection import TensorSpec
from layerzero.integrations._transformers import models as transformers_models
from layerzero.integrations._transformers.models import Built, Phase
from layerzero.printing import Progress
from layerzero.results import KeyedResult, Result, Table, call_text

if TYPE_CHECKING:
    from layerzero.costs import Share
    from layerzero.tracing import Recorder, Seen

#: Sizes where none are given.
BATCH, SEQ, CONTEXT = (1,), (128, 512), (512,)
#: No size is larger: products of two can be counted.
MOST = 1 << 30
_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, repr=False)
class ManifestEntry(KeyedResult):
    """A kind of call that this process made."""

    _columns: ClassVar[tuple[str, ...]] = ("call", "device", "count")

    call: dict[str, Any]
    """The call, as it is written down."""
    device: str
    """Where it was made: ``cpu``, ``cuda:0``."""
    count: int
    """How many times."""
    first_seen: int
    """When it was first made, in milliseconds since 1970."""
    last_seen: int
    """When it was last made."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Workload(Result, Sequence[dict[str, Any]]):
    """Calls, how often each is made, and the device: what :func:`layerzero.tune` and :func:`layerzero.regret` measure.

    A sequence of calls as they are written down. It equals another workload of the same calls, and a list of them.
    """

    calls: tuple[dict[str, Any], ...]
    """Each call once: ``op``, ``tensors``, ``params``, ``layout``."""
    counts: tuple[int, ...]
    """How often each is made, in the same order; once where no model was traced."""
    device: str
    """What torch calls the device."""
    coverage: dict[str, float] | None = None
    """Of a model: which share of its FLOPs and of the bytes it moves these calls are."""
    left_out: tuple[str, ...] = ()
    """Of a model: what is not among the calls, and why."""
    _passes: dict[str, int] | None = None
    """Of a model: the calls of its forward passes alone, as JSON, with how often they are made."""

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[dict[str, Any], ...]: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | tuple[dict[str, Any], ...]:
        return self.calls[at]

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.calls)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Workload | list | tuple):
            return self.calls == tuple(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> Table:
        lines = [
            (call["op"], call_text(call, named=False), str(count))
            for call, count in zip(self.calls, self.counts, strict=True)
        ]
        share = self.coverage
        notes = [f"{share['flops']:.1%} of the FLOPs, {share['bytes']:.1%} of the bytes moved"] if share else []
        notes += [f"left out: {text}" for text in self.left_out]
        return Table(
            f"{len(self)} call{'' if len(self) == 1 else 's'} on {self.device}",
            ("op", "call", "count"),
            lines,
            notes,
            ("count",),
        )


def written(call: Any) -> tuple[dict[str, Any], str | None]:
    """A call as it is written down, and where it was made, if it says so: of JSON, a mapping, or an answer about a call (one
    that was traced, an entry of a manifest, a row of a report)."""
    if isinstance(call, models.PlannedCall):
        call = call.call
    if isinstance(call, Result) and isinstance(inner := getattr(call, "call", None), Mapping):
        return dict(inner), getattr(call, "device", None)
    try:
        data = json.loads(call) if isinstance(call, str) else call
    except ValueError:
        data = None
    if not isinstance(data, Mapping):
        raise InvalidCallError(
            f"{call!r} is no call",
            code="BAD_CALL",
            hint="pass what lz.calls_of, lz.manifest or lz.workload gives, or a mapping with 'op' and 'tensors'",
        )
    if isinstance(inner := data.get("call"), Mapping):
        return dict(inner), str(data["device"]) if data.get("device") else None
    return dict(data), None


@dataclass
class Traced:
    """The calls of a model."""

    calls: dict[str, int] = field(default_factory=dict)
    """Each call as it is written down, with how often the passes make it."""
    others: dict[str, int] = field(default_factory=dict)
    """Calls beside those of the passes: other ways to compute the same, and what serving does around a pass."""
    share: Share | None = None
    """How much of the passes is in calls of operations LayerZero knows."""
    left_out: list[str] = field(default_factory=list)
    """What is not among the calls, and why."""
    made: list[models.Call] = field(default_factory=list)
    """Of a module: its calls, with where they are made."""
    run: Callable[[], Any] | None = None
    """Of a module with memory: runs its forward pass."""

    def specs(self) -> list[str]:
        """Every call once."""
        return list({**self.calls, **self.others})

    def counts(self) -> list[int]:
        """How often each is made, in the same order."""
        return [self.calls.get(call, 0) or self.others[call] for call in self.specs()]

    def coverage(self) -> dict[str, float] | None:
        """Which share of the FLOPs and of the bytes moved these calls are."""
        share = self.share
        return None if share is None else {"flops": share.of_flops, "bytes": share.of_bytes}


def of_module(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The calls a module makes for these inputs."""
    if not callable(module):
        raise _bad(
            f"the model is a {type(module).__name__}",
            "give a torch.nn.Module with inputs, a transformers config, or the path of a config.json",
        )
    if not args and not kwargs:
        args, kwargs = models.examples(module)
    calls, skipped, share = models.traced(module, args, kwargs)
    traced = Traced(share=share, made=calls, run=forward_of(module, args, kwargs))
    for call in calls:
        traced.calls[call.spec] = traced.calls.get(call.spec, 0) + call.count
    traced.left_out += [f"{name or 'the model'}: {function}: {why}" for function, name, why in skipped]
    if not calls:
        raise _bad(
            f"{type(module).__name__} makes no call of an operation LayerZero knows",
            "see 'layerzero ops' for those it knows",
        )
    return traced


def forward_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Runs a module; nothing where it or its inputs have no memory."""
    from torch import Tensor, nn
    from torch.utils._pytree import tree_leaves

    weights = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    leaves = [*weights, *tree_leaves((args, kwargs))]
    if any(isinstance(leaf, TensorSpec) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves):
        return None
    return lambda: module(*args, **kwargs)


def for_command(model: str, dtype: str | None, batch: list[int], seq: list[int], context: list[int]) -> str:
    """What a command measures of a model, as JSON."""
    traced = of_model(model, dtype, batch, seq, context)
    calls = [[json.loads(call), count] for call, count in zip(traced.specs(), traced.counts(), strict=True)]
    return json.dumps({"calls": calls, "left_out": traced.left_out})


def of_model(
    model: Any,
    dtype: Any = None,
    batch: Sequence[int] = (),
    seq: Sequence[int] = (),
    context: Sequence[int] = (),
    phases: Sequence[Phase] = get_args(Phase),
    progress: bool | None = None,
) -> Traced:
    """The calls a transformers model makes at these sizes: every combination of batch and length.

    Args:
        model: a configuration of transformers, as an object, a mapping, a path, text or a name; or a model of its.
        dtype: what it computes in; float32 when not given.
        batch: how many sequences at once.
        seq: lengths of prompts.
        context: how many tokens a sequence has when the next one is made, that one included.
        phases: ``prefill``, ``decode`` or both. A model that makes no tokens has no decode.
        progress: show how many forward passes are traced; by default on a terminal only.
    """
    kind = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if kind not in _FLOATS:
        raise _bad(f"a model cannot be in {kind}", f"use one of {', '.join(_FLOATS)}")
    if not phases or any(phase not in get_args(Phase) for phase in phases):
        raise _bad(f"the phases are {list(phases)}", "give 'prefill', 'decode' or both")
    for name, sizes in (("batch", batch), ("seq", seq), ("context", context)):
        for size in sizes:
            if not isinstance(size, int) or not 1 <= size <= MOST:
                raise _bad(f"'{name}' is {size!r}", f"give sizes between 1 and {MOST}")
    import torch

    with Progress(progress, "") as shown:
        if "transformers" not in sys.modules:
            shown.say("importing transformers (slow the first time)")
        built = transformers_models.build(getattr(model, "config", model), getattr(torch, kind))
    traced = Traced(left_out=list(built.left_out))
    lengths = _lengths(built, seq, context)
    wanted = [(phase, size, length) for phase in phases for length in lengths[phase] for size in batch or BATCH]
    if not wanted:
        raise _bad(f"'{built.name}' reads everything at once: it has no decode phase", "ask for the prefill phase")
    failed: list[LayerZeroError] = []
    began = time.monotonic()
    with Progress(progress, "forward passes traced", of=built.name) as shown:
        for i, (phase, size, length) in enumerate(wanted):
            left_s = (time.monotonic() - began) / i * (len(wanted) - i) if i else None
            shown.show(i, len(wanted), left_s, f"{phase}, batch {size}, length {length}")
            try:
                _pass(built, phase, size, length, max(lengths["prefill"], default=1), kind, traced)
            except models.UntraceableModelError as error:
                failed.append(error)
                traced.left_out.append(f"{phase} of batch {size}, length {length}: {error.message}")
    if len(failed) == len(wanted):
        raise failed[0]
    share = traced.share
    if share is not None and min(share.of_flops, share.of_bytes) < 0.995:
        flops, moved = 1 - share.of_flops, 1 - share.of_bytes
        traced.left_out.append(
            f"{flops:.1%} of the FLOPs and {moved:.1%} of the bytes moved: no operation computes them"
        )
    return traced


def _lengths(built: Built, seq: Sequence[int], context: Sequence[int]) -> dict[str, Sequence[int]]:
    """The lengths of each phase. Those that nobody asked for end where the model's positions do."""
    most = transformers_models.positions_of(built)
    fixed, both = transformers_models.fixed_input(built), getattr(built.model.config, "is_encoder_decoder", False)
    for length in (*(() if fixed else seq), *context):
        if most is not None and length > most:
            raise _bad(f"'{built.name}' has {most} positions, {length} were asked for", f"ask for at most {most}")

    def usual(sizes: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(size if most is None else min(size, most) for size in sizes))

    prefill = [1] if fixed else [*seq] or usual(SEQ)
    decode = ([*context] or usual(CONTEXT)) if transformers_models.generates(built) else []
    return {"prefill": prefill[:1] if fixed and both else prefill, "decode": decode}


def _pass(built: Built, phase: Phase, batch: int, length: int, prompt: int, dtype: str, traced: Traced) -> None:
    """One forward pass."""
    import torch

    from layerzero import tracing

    both = getattr(built.model.config, "is_encoder_decoder", False)
    given = transformers_models.inputs(built, batch, prompt if phase == "decode" and both else length)
    with torch.no_grad():
        found = tracing.trace(built.model, (), given, transformers_models.run_of(built, phase, length))
    if isinstance(found, tracing.Obstacle):
        raise models.untraceable(found)

    def at(one: Seen) -> Seen:
        return _at(one, batch, length) if phase == "decode" else one

    calls, skipped = models.ours(at(one) for one in found.seen)
    for call in calls:
        _add(traced.calls, call.spec, call.count)
    for call in models.ours(at(one) for one in found.alternatives)[0]:
        _add(traced.others, call.spec, call.count)
    for data, count in transformers_models.besides(built, phase, batch, length, dtype):
        _add(traced.others, json.dumps(data, separators=(",", ":")), count)
    for function, module, why in dict.fromkeys([*_alike(found), *skipped]):
        text = f"{module or built.name}: {function} is left to torch: {why}"
        if text not in traced.left_out:
            traced.left_out.append(text)
    share = found.share()
    traced.share = share if traced.share is None else traced.share + share


def _add(calls: dict[str, int], call: str, count: int) -> None:
    calls[call] = calls.get(call, 0) + count


def _alike(found: Recorder) -> list[tuple[str, str, str]]:
    return [(function, models.without_numbers(module), why) for function, module, why in found.skipped]


def _at(one: Seen, batch: int, context: int) -> Seen:
    """A call of a decode step: rotary positions are looked up in a table of the whole context."""
    if one.function != "rope" or "positions" in one.arguments:
        return one
    import torch

    arguments = dict(one.arguments)
    for name in ("cos", "sin"):
        table = arguments[name]
        arguments[name] = table._replace(shape=(context, table.shape[1]), strides=(table.shape[1], 1))
    device = arguments["input"].device
    positions = type(arguments["cos"])((batch, 1), torch.int64, (1, 1), device, False)
    return one._replace(arguments={**arguments, "positions": positions})


def _bad(text: str, hint: str) -> ConfigurationError:
    return ConfigurationError(text, code="BAD_REQUEST", hint=hint)
