"""`lz.optimize`: LayerZero's operations in a model that somebody else wrote, without changing its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from layerzero.errors import ArgumentTypeError, ConfigurationError, LayerZeroError
from layerzero.printing import aligned

if TYPE_CHECKING:
    from torch import nn

    from layerzero.integrations.models.step_graphs import StepGraphs

__all__ = ["Kept", "OptimizeReport", "Optimized", "Replaced", "optimize", "patched"]

#: What can be replaced.
PARTS = ("attention", "norms", "activations", "rope", "residuals")
#: Integers that weights may be rounded to.
PACKED_DTYPES = ("int8", "int4")
_PART_OF = {"RMS norm": "norms", "layer norm": "norms", "GELU": "activations", "SwiGLU": "activations"}


@dataclass(frozen=True)
class Replaced:
    """Modules of one class that now run an operation of LayerZero."""

    #: What they are: "RMS norm", "SwiGLU", "attention", …
    kind: str
    #: The name of their class, or of the function.
    name: str
    count: int
    #: The function of LayerZero they call.
    operation: str
    #: How many times faster than torch's own kernel the chosen one is, by rows, where both times are known.
    gain: dict[int, float] = field(default_factory=dict)
    #: What else is to be known.
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """Modules of one class that stay as they were, and why."""

    name: str
    count: int
    why: str


@dataclass(frozen=True)
class OptimizeReport:
    """What :func:`optimize` replaced, what it did not and why. Prints as a table."""

    model: str
    replaced: list[Replaced]
    kept: list[Kept]

    @property
    def expected_gain(self) -> str:
        """What is known about the gain, as a sentence."""
        known = [gain for one in self.replaced for gain in one.gain.values()]
        if not known:
            return "not measured; run lz.tune(model, inputs)"
        return (
            f"{min(known):.2f} to {max(known):.2f} times as fast per operation, against torch's own kernel for it; "
            "where the model wrote an operation out in several, more"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        from dataclasses import asdict

        return {**asdict(self), "expected_gain": self.expected_gain}

    def __str__(self) -> str:
        lines = [f"{self.model}: {sum(one.count for one in self.replaced)} parts run LayerZero's operations"]
        rows = [
            (f"{one.count}x", one.name, f"lz.{one.operation}", "; ".join(_said(one)))
            for one in sorted(self.replaced, key=lambda one: -one.count)
        ]
        rows += [
            (f"{one.count}x", one.name, "as it was", one.why) for one in sorted(self.kept, key=lambda one: -one.count)
        ]
        lines += [f"  {line}" for line in aligned((), rows)]
        lines.append(f"expected gain: {self.expected_gain}")
        return "\n".join(lines)


def _said(one: Replaced) -> Iterator[str]:
    yield one.kind
    if one.gain:
        yield ", ".join(f"{gain:.2f}x torch at {rows} rows" for rows, gain in one.gain.items())
    if one.note:
        yield one.note


class Optimized:
    """A model that :func:`optimize` has changed. :meth:`undo` brings the model back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.report = OptimizeReport(type(model).__name__, [], [])
        #: How many steps were replayed as CUDA graphs, and why others were not; ``None`` where none are.
        self.graphs: StepGraphs | None = None
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Every module, configuration and function as before. Calling it again changes nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        return f"<Optimized {self.report.model}: {sum(one.count for one in self.report.replaced)} parts>"


def optimize(
    model: nn.Module,
    *,
    only: tuple[str, ...] | list[str] | None = None,
    fuse_qkv: bool = False,
    pack_weights: bool | str = False,
    cuda_graphs: bool = False,
) -> Optimized:
    """Replaces parts of a model by operations of LayerZero: attention, norms, rotary embedding, gated MLPs.

    A part is found by its structure. Norms, activations, gated MLPs and rotary embedding are replaced only if LayerZero's
    operation gives their result on random numbers, in their dtype and on their device, up to rounding. Attention and the
    sum before a norm are found in the model's source. Weights are not copied. Parts that are no operation of LayerZero
    stay as they were, and the report lists them.

        with lz.optimize(model) as optimized:
            print(optimized.report)
            model.generate(...)

    Args:
        model: a module; of transformers, diffusers or any other.
        only: which parts to replace, of "attention", "norms", "activations", "rope" and "residuals" (the sum before a
            norm, with the norm); all when not given. Attention is replaced in models of transformers and diffusers, rope
            where the file of a module's class has a function ``apply_rotary_pos_emb``.
        fuse_qkv: also compute the projections of query, key and value as one product, outside of training. Their weights
            move into one block of memory; the parameters stay, as parts of it. Weights that are quantized, wrapped by an
            adapter or tied stay as they are, and are listed.
        pack_weights: also multiply with packed copies (:func:`pack`) of the weights of linear layers on the CPU, outside of
            training. Each layer is timed with and without its copy at 1, 4, 16 and 64 rows, and the copy is used up to the
            most rows at which it is faster. The copies take as much memory as the weights; the report says how much.
            ``"int8"`` and ``"int4"`` round the copies to integers (``lz.pack(weight, dtype=...)``), of which there is less to
            read. The model's results change: compare them with those of the model as it was.
        cuda_graphs: also replay whole steps of the model as CUDA graphs, from the third call of the same shapes on, outside
            of training. ``generate()`` uses a cache of fixed size then, unless you give it another. What cannot be
            captured runs as it is; ``graphs`` of the result says how many steps were replayed, and why others were not.

    Returns:
        An object with ``report``, ``graphs`` and ``undo()``; as a context manager it undoes at the end.

    Raises:
        ArgumentTypeError: the model is no ``torch.nn.Module``.
        ConfigurationError: ``only`` or ``pack_weights`` names something else.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"optimize: the model is a {type(model).__name__}, not a torch.nn.Module",
            code="NOT_A_MODEL",
            hint="build the model first, then lz.optimize(model)",
        )
    parts = PARTS if only is None else tuple(only)
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigurationError(
            f"optimize: there is no part {unknown[0]!r}", code="BAD_PARAM", hint=f"choose from {', '.join(PARTS)}"
        )
    if pack_weights not in (False, True, *PACKED_DTYPES):
        raise ConfigurationError(
            f"optimize: pack_weights is {pack_weights!r}",
            code="BAD_PARAM",
            hint=f"choose from True, False, {', '.join(map(repr, PACKED_DTYPES))}",
        )
    done = Optimized(model)
    try:
        _Work(done, parts, fuse_qkv, pack_weights, cuda_graphs).run()
    except BaseException:
        done.undo()
        raise
    return done


@contextmanager
def patched(
    model: nn.Module,
    *,
    only: tuple[str, ...] | list[str] | None = None,
    fuse_qkv: bool = False,
    pack_weights: bool | str = False,
    cuda_graphs: bool = False,
) -> Iterator[Optimized]:
    """:func:`optimize` for the length of a block.

        with lz.patched(model) as optimized:
            model.generate(...)

    Args:
        model: a module; of transformers, diffusers or any other.
        only: which parts to replace; all when not given.
        fuse_qkv: also compute the projections of query, key and value as one product.
        pack_weights: also multiply with packed copies of the weights of linear layers on the CPU; ``"int8"`` and ``"int4"``
            round them.
        cuda_graphs: also replay whole steps of the model as CUDA graphs.
    """
    with optimize(model, only=only, fuse_qkv=fuse_qkv, pack_weights=pack_weights, cuda_graphs=cuda_graphs) as done:
        yield done


class _Work:
    """One run of :func:`optimize`."""

    def __init__(
        self, done: Optimized, parts: tuple[str, ...], fuse_qkv: bool, pack_weights: bool | str, cuda_graphs: bool
    ) -> None:
        self._done = done
        self._model = done.model
        self._parts = parts
        self._fuse_qkv = fuse_qkv
        self._pack_weights = pack_weights
        self._cuda_graphs = cuda_graphs
        #: Projections that are computed together.
        self._fused: set[nn.Module] = set()
        #: Linear layers of which something was said.
        self._packed: set[nn.Module] = set()
        self._replaced: Counter[tuple[str, str, str, str]] = Counter()
        self._widths: dict[tuple[str, str], set[int]] = {}
        self._kept: Counter[tuple[str, str]] = Counter()

    def run(self) -> None:
        """All parts. Residuals come after the norms that they are fused with."""
        if self._fuse_qkv:
            self._projections()
        packed = self._linears() if self._pack_weights else []
        self._modules()
        if "residuals" in self._parts:
            self._residuals()
        if "attention" in self._parts:
            self._attention()
        if "rope" in self._parts:
            self._rope()
        if self._cuda_graphs:
            self._graphs()
        replaced = [
            Replaced(kind, name, count, operation, self._gain(operation, kind, name), note)
            for (kind, name, operation, note), count in self._replaced.items()
        ]
        replaced += packed
        kept = [Kept(name, count, why) for (name, why), count in self._kept.items()]
        self._done.report = OptimizeReport(type(self._model).__name__, replaced, kept)

    def _projections(self) -> None:
        from layerzero.integrations.models import projections, replacing

        owners = projections.owners_of(self._model)
        for module in self._model.modules():
            forward = projections.fuse(module, owners)
            if forward is None:
                continue
            if isinstance(forward, str):
                self._kept[type(module).__name__, forward] += 1
                continue
            self._done._undo.append(lambda module=module: projections.separate(module))  # type: ignore[misc]
            replacing.bind(module, forward)
            self._done._undo.append(lambda module=module: replacing.unbind(module))  # type: ignore[misc]
            self._fused.update(projections.of(module))
            self._replaced["QKV projections", type(module).__name__, "linear", "one product for three"] += 1

    def _linears(self) -> list[Replaced]:
        """Packs the weights of linear layers. One entry for each size."""
        from layerzero.integrations.models import packed_linears, replacing

        known: packed_linears.Known = {}
        sizes: dict[tuple[str, str, int], list[packed_linears.Packed]] = {}
        dtype = self._pack_weights if isinstance(self._pack_weights, str) else None
        for module in self._model.modules():
            found = None if module in self._fused else packed_linears.packed(module, known, dtype=dtype)
            if found is None:
                continue
            self._packed.add(module)
            if isinstance(found, str):
                self._kept[type(module).__name__, found] += 1
                continue
            self._done._undo.append(lambda module=module: packed_linears.release(module))  # type: ignore[misc]
            replacing.bind(module, packed_linears.forward)
            self._done._undo.append(lambda module=module: replacing.unbind(module))  # type: ignore[misc]
            outs, ins = found.weight.shape
            sizes.setdefault((type(module).__name__, f"{outs}x{ins}", found.most_rows), []).append(found)
        return [
            Replaced(
                "packed weight",
                name,
                len(layers),
                "linear",
                layers[0].gain,
                f"{size}{f' {dtype}' if dtype else ''}, up to {rows} rows, "
                f"{sum(layer.weight.nbytes for layer in layers) / 1e6:,.1f} MB of copies",
            )
            for (name, size, rows), layers in sizes.items()
        ]

    def _modules(self) -> None:
        from torch import nn

        from layerzero.integrations.models import replacing

        for module in self._model.modules():
            name = type(module).__name__
            found = replacing.match(module)
            if isinstance(found, str):
                self._kept[name, found] += 1
            elif found is not None and _PART_OF[found.kind] in self._parts:
                replacing.bind(module, found.forward)
                self._done._undo.append(lambda module=module: replacing.unbind(module))  # type: ignore[misc]
                self._replaced[found.kind, name, found.operation, ""] += 1
                if found.operated is not None:
                    self._widths.setdefault((found.kind, name), set()).add(found.operated)
            elif module in self._fused or module in self._packed:
                continue
            elif found is None and isinstance(module, nn.Linear | nn.Embedding):
                self._kept[name, "torch runs one kernel for it already"] += 1
            elif found is None and type(module).__name__.endswith("Experts"):
                self._kept[name, "LayerZero has no operation for experts"] += 1
            elif found is None and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                self._kept[name, "LayerZero has no convolutions"] += 1
            elif found is None and isinstance(module, nn.GroupNorm):
                self._kept[name, "LayerZero has no group norm"] += 1
            elif found is None and isinstance(module, nn.LayerNorm):
                self._kept[name, "a layer norm with a forward of its own, or of several dimensions"] += 1

    def _residuals(self) -> None:
        from layerzero.integrations.models import replacing, residuals

        for module in self._model.modules():
            forward = residuals.fused(module)
            if forward is None:
                continue
            if isinstance(forward, str):
                self._kept[type(module).__name__, f"sum and norm: {forward}"] += 1
                continue
            replacing.bind(module, forward)
            self._done._undo.append(lambda module=module: replacing.unbind(module))  # type: ignore[misc]
            self._replaced["sum and norm", type(module).__name__, "fused_add_rms_norm", ""] += 1

    def _attention(self) -> None:
        from layerzero.integrations._diffusers import switch as diffusers_switch
        from layerzero.integrations._transformers import switch as transformers_switch

        name = type(self._model).__name__
        try:
            if transformers_switch.of_transformers(self._model):
                configs, found = transformers_switch.switch(self._model)
                self._done._undo.append(lambda: transformers_switch.restore(configs))
            elif diffusers_switch.of_diffusers(self._model):
                undo, found = diffusers_switch.switch(self._model)
                self._done._undo.extend(undo)
            else:
                self._kept[name, "attention: not a model of transformers or diffusers"] += 1
                return
        except LayerZeroError as error:
            self._kept[name, f"attention: {error.message}"] += 1
            return
        for attention, count in found.served.items():
            self._replaced["attention", attention, "attention", ""] += count
        for (attention, why), count in found.kept.items():
            self._kept[attention, why] += count
        if hasattr(self._model, "generate"):
            self._kept["sampling", "generate() draws its tokens itself"] += 1

    def _rope(self) -> None:
        from layerzero.integrations.models import rotary_functions

        parameter = next(self._model.parameters(), None)
        if parameter is None or parameter.is_meta:
            return
        dtype = parameter.dtype if parameter.dtype.is_floating_point else None
        if dtype is None:
            return
        for file in rotary_functions.files_of(self._model):
            name = f"{file.rpartition('.')[2]}.{rotary_functions.NAME}"
            why = rotary_functions.take(file, dtype, parameter.device)
            if why is not None:
                self._kept[name, why] += 1
                continue
            self._done._undo.append(lambda file=file: rotary_functions.release(file))  # type: ignore[misc]
            self._replaced["rotary embedding", name, "rope", "of the whole file, until undo()"] += 1

    def _graphs(self) -> None:
        from layerzero.integrations.models import generation_settings, step_graphs

        name = type(self._model).__name__
        devices = sorted({str(parameter.device) for parameter in self._model.parameters()})
        if len(devices) != 1 or not devices[0].startswith("cuda"):
            self._kept[name, f"CUDA graphs: the model is on {', '.join(devices) or 'no device'}"] += 1
            return
        if (known := step_graphs.of(self._model)) is not None:
            self._done.graphs = known
            self._kept[name, "CUDA graphs: its steps are replayed already"] += 1
            return
        before = vars(self._model).get("forward")
        self._done.graphs = step_graphs.start(self._model)
        self._done._undo.append(lambda: step_graphs.stop(self._model, before))
        if (undo := generation_settings.fixed_cache(self._model)) is not None:
            self._done._undo.append(undo)

    def _gain(self, operation: str, kind: str, name: str) -> dict[int, float]:
        """How many times torch's kernel the chosen one is, at a row of decoding and at a prompt's."""
        import torch

        from layerzero.inspection import explain

        parameter = next(self._model.parameters(), None)
        widths = self._widths.get((kind, name))
        if operation not in ("rms_norm", "layer_norm", "silu_mul", "gelu") or not widths or parameter is None:
            return {}
        gain = {}
        for rows in (1, 512):
            # Only its shape counts, so its numbers are not set.
            x = torch.empty(rows, max(widths), dtype=parameter.dtype, device=parameter.device)
            row = torch.empty(max(widths), dtype=parameter.dtype, device=parameter.device)
            given: dict[str, tuple[Any, ...]] = {
                "rms_norm": (x, row, 1e-6),
                "layer_norm": (x, None, row, row),
                "silu_mul": (x, x),
                "gelu": (x,),
            }
            try:
                times = explain(operation, *given[operation]).times_baseline
            except LayerZeroError:
                continue
            if times is not None:
                gain[rows] = round(times, 2)
        return gain
