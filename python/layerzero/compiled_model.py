"""``lz.compile``: a model as a graph that runs in one native call.

    compiled = lz.compile(model, input_ids)
    logits = compiled(input_ids)

The model is exported by ``torch.export``, its graph is optimised, and each node gets a kernel. A call with other sizes exports the
model again with the sizes that differ as symbols. What cannot be exported, and calls that need gradients, are left to the model.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import _native, deciding, loading
from layerzero.errors import ConfigurationError, InvalidCallError, LayerZeroError, warn
from layerzero.graph_answers import GraphReport, GraphStep, TimedStep
from layerzero.lifecycle import open_in_forks
from layerzero.results import Rows, rows

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.export import Exported
    from layerzero.generating import Decoder

#: How often a model is exported for sizes that do not fit what was exported before.
_MOST_EXPORTS = 8
#: What weights can be rounded to.
_NARROW = ("bfloat16", "int8", "int4")


@dataclass(frozen=True)
class _How:
    """How graphs are compiled."""

    tune: bool = False
    off: tuple[str, ...] = ()
    weights: str | None = None
    precision: str = "highest"


class _Variant:
    """A model exported for some sizes, or ranges of them."""

    def __init__(
        self, exported: Exported, example: Sequence[Tensor], how: _How, share: _native.Session | None = None
    ) -> None:
        import torch

        self.exported = exported
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
        #: Inputs of the sizes it was first made for: what `steps` shows without others.
        self.example = list(example)
        positional, named = _parts(exported.in_spec)
        self.plain = exported.taken == list(range(positional.num_leaves)) and named.num_leaves == 0
        self.plain = self.plain and all(part.is_leaf() for part in _parts(positional))
        self.single = exported.given == [(0, None)] and exported.out_spec.is_leaf()
        #: A call in native code alone, or nothing where it cannot be one.
        self.quick = self.session.quick if self.plain and self.single and self.host is None else None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The inputs of the graph, from the arguments of a call."""
        if self.plain and not kwargs and len(args) == len(self.exported.taken):
            return [*args, *self.exported.buffers]
        return self.exported.flatten(args, kwargs)

    def run(self, inputs: list[Tensor]) -> Any:
        """A call."""
        results = self.session.run(inputs, self.host)
        return results[0] if self.single else self.exported.unflatten(results)

    def fits(self, inputs: Sequence[Tensor]) -> str:
        """Why it cannot serve inputs of these sizes; nothing if it can."""
        symbols: dict[str, int] = {}
        for tensor, (name, dtype, shape) in zip(inputs, self.graph.inputs, strict=True):
            if not hasattr(tensor, "shape"):
                return f"'{name}' is a {type(tensor).__name__}, the graph takes a tensor"
            if str(tensor.dtype) != f"torch.{dtype}" or tensor.dim() != len(shape):
                given = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                return f"'{name}' is {given}, the graph takes {dtype}[{', '.join(map(str, shape))}]"
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


class CompiledModel:
    """A model that runs in one native call. You call it as you call the model, on the CPU and for inference.

    Weights are read where the model has them, but packed copies are made of some: after a change of weights, call
    :meth:`refresh`. Results never need gradients; a call whose inputs do, with gradients enabled, is the model's own.
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
        share: _native.Session | None = None,
    ) -> None:
        #: The model.
        self.model = model
        self._dynamic_shapes, self._strict = dynamic_shapes, strict
        self._how, self._share = _How(tune, tuple(off), weights, precision), share
        self._lock = open_in_forks(threading.RLock())
        self._variants: list[_Variant] = []
        self._by_sizes: dict[tuple[Any, ...], _Variant | None] = {}
        self._calls, self._left = 0, Counter[str]()
        self._decided: deciding.Plan | None = None
        self._closed = ""
        self._decoder: Decoder | None = None
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._error: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        variants = self._variants
        if not kwargs:
            for variant in variants:
                if variant.quick is not None and (found := variant.quick(args)) is not None:
                    self._calls += 1
                    return found
        if not variants:
            self._prepare(args, kwargs)
            variants = self._variants
        if self._decided is not None:
            return self._decided(*args, **kwargs)
        first = variants[0] if variants else None
        if first is None:
            return self._left_to_model(self._closed, args, kwargs)
        try:
            inputs = first.inputs(args, kwargs)
            key = tuple([(one.dtype, one.shape) for one in inputs])
        except Exception as error:  # noqa: BLE001 - other arguments than those of the examples
            return self._left_to_model(f"other arguments: {_line(error)}", args, kwargs)
        if _wants_gradients(inputs):
            return self._left_to_model("gradients", args, kwargs)
        if self._by_sizes.get(key) is first:
            self._calls += 1
            return first.run(inputs)
        return self._other_sizes(key, args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Exports the model for its first arguments."""
        with self._lock:
            if self._variants or self._decided is not None or self._closed:
                return
            where = {one.device.type for one in _tensors((args, kwargs))}
            if where - {"cpu"}:
                # Graphs run on the CPU; elsewhere the kernels of the model's own calls are decided once.
                self._decided = deciding.decide(self.model, *args, **kwargs)
                return
            self._variants = [self._exported(args, kwargs, self._dynamic_shapes)]
            self._example = args, kwargs

    def _exported(self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> _Variant:
        from layerzero.export import export
        from layerzero.export.refusals import ExportError, line_of_definition

        if getattr(self.model, "training", False):
            raise InvalidCallError(
                "the model is in training mode, and a compiled model is for inference",
                code="TRAINING_MODE",
                hint="call model.eval() first",
            )
        try:
            exported = export(_module(self.model), args, kwargs, dynamic_shapes=dynamic_shapes)
        except ExportError as error:
            # torch notes the lines of modules, and not those of functions.
            if error.line or not (line := line_of_definition(self.model)):
                raise
            raise ExportError(error.message, line=line, code=error.code, hint=error.hint) from error
        if self._strict and len(exported.host_calls):
            raise InvalidCallError(
                f"{', '.join(exported.hosts)} would stay torch's",
                code="NOT_EXPORTABLE",
                hint="leave strict=True out, or write the model without these",
            )
        return _Variant(exported, exported.flatten(args, kwargs), self._how, self._shared())

    def _shared(self) -> _native.Session | None:
        """A session of the same weights, whose packed copies another one takes."""
        if self._variants:
            return self._variants[0].session
        return self._decoder.session if self._decoder is not None else self._share

    def _other_sizes(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose sizes were not seen, or which another export serves."""
        with self._lock:
            if key not in self._by_sizes:
                if len(self._by_sizes) > 4096:
                    self._by_sizes.clear()
                self._by_sizes[key] = self._for_sizes(args, kwargs)
            variant = self._by_sizes[key]
        if variant is None:
            return self._left_to_model("sizes outside of what was exported", args, kwargs)
        self._calls += 1
        return variant.run(variant.inputs(args, kwargs))

    def _for_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Variant | None:
        """Who serves these sizes: an export there is, or a new one whose sizes are symbols where they differ."""
        for variant in self._variants:
            if not variant.fits(variant.inputs(args, kwargs)):
                return variant
        if self._dynamic_shapes is not None or len(self._variants) >= _MOST_EXPORTS:
            first = self._variants[0]
            why = first.fits(first.inputs(args, kwargs))
            if self.model is not None:
                warn(f"{self._name} runs by itself: {why}, which it was not compiled for")
            return None
        try:
            variant = self._exported(args, kwargs, self._open_sizes(args, kwargs))
        except Exception:  # noqa: BLE001 - sizes that cannot be symbols are exported as they are
            try:
                variant = self._exported(args, kwargs, None)
            except LayerZeroError as error:
                # The model may refuse them too, and then says so itself.
                self.model(*args, **kwargs)
                warn(f"{self._name} runs by itself: {_line(error)}")
                return None
        self._variants = [*self._variants, variant]
        return variant

    def _open_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch.export is told: sizes that differ from those of the first call are symbols."""
        import torch
        from torch.utils import _pytree as pytree

        first = self._variants[0]
        flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        shapes: list[Any] = [None] * len(flat)
        for at, before in zip(first.exported.taken, first.example, strict=False):
            now = flat[at]
            shapes[at] = {
                axis: torch.export.Dim.AUTO
                for axis, (a, b) in enumerate(zip(now.shape, before.shape, strict=True))
                # A size of 0 or 1 is never a symbol.
                if a != b and a > 1
            }
        positional, named = pytree.tree_unflatten(shapes, spec)
        return {**dict(zip(_parameters(self.model), positional, strict=False)), **named}

    def _left_to_model(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._left[why] += 1
        return self.model(*args, **kwargs)

    def decoder(self) -> Decoder:
        """The graph that :meth:`generate` runs: it is made at its first use, once for all batches and lengths."""
        from layerzero.generating import Decoder

        with self._lock:
            if self._decoder is None:
                self._decoder = Decoder(self.model, self._how, self._shared())
            return self._decoder

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        generator: Any = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        num_return_sequences: int = 1,
        on_token: Callable[[Tensor], Any] | None = None,
    ) -> Tensor:
        """The prompts and the tokens that follow them, (batch, tokens). For causal language models of transformers.

        The prompt runs at once; each later token is a step over a cache of keys and values, of which only what is written is
        read. Tokens are chosen greedily, or drawn if ``temperature``, ``top_k`` or ``top_p`` is given.

        Args:
            input_ids: prompts (batch, tokens) or (tokens,), or a list of prompts of any lengths.
            max_new_tokens: how many tokens to generate at most.
            attention_mask: 0 where a prompt is padded, as the tokenizer gives it. Padding is on the left.
            temperature: scores are divided by it; 0 is greedy.
            top_k: draw among so many tokens with the largest scores.
            top_p: draw among the most likely tokens that together have this probability.
            seed: makes the draws the same at every call.
            generator: torch's generator to draw with, in the place of a seed.
            eos_token_id: ids that end a sequence; without it those of the model, if it has any. An empty list is none.
            pad_token_id: what follows the end of a sequence while others go on; without it the first id of the end.
            num_return_sequences: generate so many for each prompt.
            on_token: called with the new tokens (batch,) after each step. Generating ends where it returns ``False``.
        """
        from layerzero.generating import loop, sampling

        choose = sampling.choice(temperature, top_k, top_p, seed, generator)
        ids, firsts = loop.prompt(input_ids, attention_mask)
        if num_return_sequences != 1:
            ids, firsts = (one.repeat_interleave(num_return_sequences, 0) for one in (ids, firsts))
        decoder = self.decoder()
        ending = loop.ends(self.model, eos_token_id)
        return loop.generate(decoder, ids, firsts, max_new_tokens, choose, ending, pad_token_id, on_token)

    def refresh(self) -> None:
        """Forgets everything that was made of the weights. The next call exports the model again."""
        with self._lock:
            self._variants, self._decided, self._closed = [], None, ""
            self._decoder = None
            self._by_sizes.clear()

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Variant, list[Tensor]]:
        if args or kwargs:
            self(*args, **kwargs)
        if not self._variants:
            raise InvalidCallError(
                "nothing is compiled yet",
                code="NO_EXAMPLE_INPUTS",
                hint="call the compiled model once, or pass inputs: compiled.report(x)",
            )
        if not (args or kwargs):
            return self._variants[0], self._variants[0].example
        inputs = self._variants[0].inputs(args, kwargs)
        found = self._by_sizes.get(tuple([(one.dtype, one.shape) for one in inputs]))
        if found is None:
            raise InvalidCallError(
                "the model runs by itself for these inputs", code="WRONG_INPUT", hint="pass sizes it was compiled for"
            )
        return found, found.inputs(args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Rows[GraphStep]:
        """The steps for some inputs, or those of the first call: which kernel runs each, and which others could."""
        variant, inputs = self._variant(args, kwargs)
        return rows((GraphStep(**row) for row in variant.session.steps(inputs)), "steps")

    def report(self, *args: Any, **kwargs: Any) -> GraphReport:
        """What became of the model, for some inputs or those of the first call."""
        variant, inputs = self._variant(args, kwargs)
        steps = variant.session.steps(inputs)
        targets = [row["kernel"] for row in steps]
        optimised = variant.session.optimised
        slow = Counter(row["op"] for row in steps if row["kernel"].startswith("reference."))
        return GraphReport(
            model=self._name,
            nodes_exported=optimised["before"],
            nodes=optimised["after"],
            steps=len(steps),
            rewrites=optimised["rewrites"],
            kernels=dict(Counter(targets)),
            torch_calls=dict(Counter(call.name for call in variant.exported.host_calls.calls)),
            slow_steps=dict(slow),
            arena_bytes=variant.session.arena(inputs),
            weights=self._how.weights or "float32",
            precision=self._how.precision,
            weight_bytes=variant.session.source_bytes,
            packed_bytes=variant.session.packed_bytes,
            largest_error=self.largest_error(),
            exports=len(self._variants),
            plans=sum(one.session.plans for one in self._variants),
            calls=self._calls,
            model_calls=dict(self._left),
        )

    def largest_error(self) -> float | None:
        """How far results for the first inputs are from those of the model: the largest difference ÷ the largest number.

        It is known for narrow ``weights``, and measured at the first use. None without them.
        """
        if self._how.weights is None or self._error is not None or self._example is None or self.model is None:
            return self._error
        import torch

        args, kwargs = self._example
        with torch.no_grad():
            expected, found = self.model(*args, **kwargs), self(*args, **kwargs)
        self._error = largest_error(_tensors(found), _tensors(expected))
        return self._error

    def profile(self, *args: Any, rounds: int = 20, **kwargs: Any) -> Rows[TimedStep]:
        """The median time of each step, over some runs."""
        variant, inputs = self._variant(args, kwargs)
        timed = variant.session.profile(inputs, rounds, variant.host)
        total = sum(row["us"] for row in timed) or 1.0
        return rows(
            (
                TimedStep(
                    op=row["op"],
                    kernel=row["kernel"],
                    us=row["us"],
                    share=row["us"] / total,
                    gflops=row["flops"] / max(row["us"], 1e-3) / 1e3,
                    gbytes=row["bytes"] / max(row["us"], 1e-3) / 1e3,
                    output=row["output"],
                    origin=row["origin"],
                )
                for row in timed
            ),
            "steps",
        )

    def save_trace(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as trace events, which ``chrome://tracing`` and Perfetto show."""
        events, begin = [], 0.0
        for step in self.profile(*args, rounds=rounds, **kwargs):
            names = {"kernel": step.kernel, "output": step.output, "origin": step.origin}
            events.append({"name": step.op, "ph": "X", "ts": begin, "dur": step.us, "pid": 1, "tid": 1, "args": names})
            begin += step.us
        Path(path).write_text(json.dumps({"traceEvents": events}))
        return Path(path)

    def save_profile(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as an HTML page: steps by their time, kernels, and floors where the machine's peaks are known."""
        from layerzero import profile_page

        steps = self.profile(*args, rounds=rounds, **kwargs)
        text = profile_page.page(self._name, _hardware(), steps, profile_page.ceilings())
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    @property
    def _name(self) -> str:
        return type(self.model).__name__ if not inspect.isroutine(self.model) else str(self.model.__name__)

    def graph(self, form: str = "text") -> str:
        """The optimised graph: as ``text``, a node a line, or as ``dot`` for Graphviz."""
        if form not in ("text", "dot"):
            raise InvalidCallError(f"form is {form!r}, expected 'text' or 'dot'", code="BAD_PARAM")
        variant, _ = self._variant((), {})
        found: str = variant.session.text() if form == "text" else variant.session.dot()
        return found

    def save(self, path: str | Path) -> Path:
        """Writes the compiled model to a file, weights included. :func:`load_plan` reads it without the model's code."""
        from layerzero import nesting, plan_files

        variant, _ = self._variant((), {})
        exported = variant.exported
        if len(exported.host_calls):
            raise InvalidCallError(
                f"{', '.join(exported.hosts)} stay torch's calls, which a file cannot hold",
                code="NOT_EXPORTABLE",
                hint="compile with strict=True to see all of them",
            )
        try:
            arguments, results = nesting.dumps(exported.in_spec), nesting.dumps(exported.out_spec)
        except nesting.NestingError as error:
            raise InvalidCallError(
                f"arguments or results cannot be written: {_line(error)}",
                code="NOT_EXPORTABLE",
                hint="pass and return tensors, lists, tuples and dicts",
            ) from error
        names = json.loads(exported.document)["constants"]
        weights = dict(zip(names, exported.constants, strict=True))
        weights |= {f"buffer:{at}": buffer for at, buffer in enumerate(exported.buffers)}
        head = {
            "model": self._name,
            "hardware": _hardware(),
            "document": exported.document,
            "conditions": [str(one) for one in exported.conditions],
            "taken": exported.taken,
            "given": exported.given,
            "arguments": arguments,
            "results": results,
            "examples": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in variant.example],
            "off": list(self._how.off),
            "tune": self._how.tune,
            "numbers": self._how.weights,
            "precision": self._how.precision,
        }
        return plan_files.write(path, head, weights)

    def __repr__(self) -> str:
        return f"<CompiledModel of {type(self.model).__name__}: {len(self._variants)} exports, {self._calls} calls>"

    def eval(self) -> CompiledModel:
        """The compiled model itself: it is for inference."""
        return self


class LoadedModel(CompiledModel):
    """A compiled model from a file. It has no model to fall back to: other sizes than those it was exported for are an error."""

    #: What the file says the model is called.
    _written: str = "LoadedModel"

    @property
    def _name(self) -> str:
        return self._written

    def _left_to_model(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        variant = self._variants[0]
        try:
            detail = variant.fits(variant.inputs(args, kwargs)) or why
        except LayerZeroError as error:
            detail = f"other arguments: {error.message}"
        raise InvalidCallError(
            f"this plan cannot serve the call: {detail}",
            code="WRONG_INPUT",
            hint="compile the model for these inputs, and save it again",
        )

    def decoder(self) -> Decoder:
        """Not for models from files, which have no graph for it."""
        raise InvalidCallError(
            "a plan from a file cannot generate", code="WRONG_INPUT", hint="compile the model in this process"
        )

    def refresh(self) -> None:
        """Not for models from files: their weights are in the file."""
        raise InvalidCallError("a plan from a file has no model", code="WRONG_INPUT", hint="compile the model again")


def _parts(spec: Any) -> list[Any]:
    """What a nested structure holds, as torch 2.10 and later tell it."""
    found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return found


@cache
def _hardware() -> str:
    """This machine's CPU."""
    return str(json.loads(_native.devices())[0]["name"])


def compile(
    model: Any,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    tune: bool = False,
    off: Sequence[str] = (),
    strict: bool = False,
    weights: str | None = None,
    precision: str | None = None,
) -> CompiledModel:
    """A model as one native call: ``compiled = lz.compile(model, x)``, then ``compiled(x)``.

    The model is exported for the inputs now, or for those of the first call if there are none. Calls with other sizes work too.

    Args:
        model: a module in evaluation mode, or a function of tensors.
        example_inputs: what it is called with.
        kwargs: what it is called with by name.
        dynamic_shapes: which sizes may differ, as ``torch.export`` takes it. Without it, sizes that turn out to differ are.
        tune: time the kernels of each node in their places, and take the fastest.
        off: names of optimisation passes that are left out.
        strict: raise an error if a part of the model would stay torch's.
        weights: the numbers that weights of linear layers are kept in: ``"bfloat16"``, ``"int8"`` or ``"int4"``, rounded as
            :func:`pack` does it. Results differ from the model's; ``report().largest_error`` says how much. The model keeps
            its own weights.
        precision: how exactly products of float32 are computed, as ``torch.set_float32_matmul_precision`` says it, whose setting is
            taken by default. ``"highest"``: as exactly as in float32; where the CPU multiplies bfloat16 by a matrix unit, numbers may
            be split into three of those, which hold all their bits. ``"high"``: into two, which hold 16 bits; so does ``"medium"``.
            ``"float32"``: nothing is split.
    """
    if weights not in (None, *_NARROW):
        raise InvalidCallError(
            f"weights is {weights!r}, expected one of {', '.join(_NARROW)}",
            code="BAD_PARAM",
            hint="leave it out to keep the model's numbers",
        )
    precision = _precision(precision)
    loading.load()
    if not callable(model):
        raise InvalidCallError(
            f"{type(model).__name__} cannot be called", code="NOT_A_MODEL", hint="pass a torch.nn.Module or a function"
        )
    compiled = CompiledModel(
        model, dynamic_shapes=dynamic_shapes, tune=tune, off=off, strict=strict, weights=weights, precision=precision
    )
    if example_inputs or kwargs:
        compiled._prepare(example_inputs, dict(kwargs or {}))
    return compiled


def _precision(asked: str | None) -> str:
    """The precision of products, without an answer torch's."""
    import torch

    if asked not in (None, "float32", "highest", "high", "medium"):
        raise InvalidCallError(
            f"precision is {asked!r}, expected 'float32', 'highest', 'high' or 'medium'",
            code="BAD_PARAM",
            hint="leave it out to follow torch.set_float32_matmul_precision",
        )
    found = asked or torch.get_float32_matmul_precision()
    return "high" if found == "medium" else found


def load_plan(path: str | Path, *, verify: bool = True) -> CompiledModel:
    """A compiled model that :meth:`CompiledModel.save` wrote. The model's own code is not needed.

    Weights are mapped from the file. ``verify`` compares them with their checksums, which reads all of them once.
    """
    import torch

    from layerzero import nesting, plan_files
    from layerzero.export import Exported
    from layerzero.export.host_calls import HostCalls

    loading.load()
    try:
        file = plan_files.read(path, verify=verify)
        head = file.head
        count = len(json.loads(head["document"])["constants"])
        exported = Exported(
            document=head["document"],
            constants=file.weights[:count],
            buffers=file.weights[count:],
            host_calls=HostCalls(),
            conditions=[_condition(one) for one in head["conditions"]],
            taken=[int(at) for at in head["taken"]],
            given=[(None if at is None else int(at), constant) for at, constant in head["given"]],
            in_spec=nesting.loads(head["arguments"]),
            out_spec=nesting.loads(head["results"]),
        )
        example = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape in head["examples"]]
        how = _How(
            tune=bool(head["tune"]),
            off=tuple(str(one) for one in head["off"]),
            weights=head.get("numbers"),
            precision=head.get("precision", "highest"),
        )
        loaded = LoadedModel(None, dynamic_shapes=(), **asdict(how))
        loaded._variants = [_Variant(exported, _zeros(example), how)]
        loaded._written = str(head["model"])
        _checked(loaded._variants[0])
        here, there = _hardware(), str(head["hardware"])
    except ConfigurationError:
        raise
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError),
        *(RecursionError, OverflowError, MemoryError, NotImplementedError, SyntaxError),
    ) as error:
        raise ConfigurationError(
            f"{path} is no plan of a compiled model: {_line(error)}",
            code="BAD_PLAN",
            hint="make it anew with lz.compile(…).save(…)",
        ) from error
    if there != here:
        warn(f"{path} was written on {there}; its kernels are chosen anew for {here}")
    return loaded


def _checked(variant: _Variant) -> None:
    """Checks that arguments, results and examples are those of the graph."""
    exported, graph = variant.exported, variant.graph
    taken, given = exported.taken, exported.given
    if len(taken) + len(exported.buffers) != len(graph.inputs) or len(set(taken)) != len(taken):
        raise ValueError(f"it takes {len(taken)} arguments, and its graph {len(graph.inputs)}")
    if any(not 0 <= at < exported.in_spec.num_leaves for at in taken) or exported.in_spec.num_children != 2:
        raise ValueError("it takes arguments that it does not have")
    results = range(len(graph.outputs))
    if len(given) != exported.out_spec.num_leaves or any(at is not None and at not in results for at, _ in given):
        raise ValueError("it gives results that its graph does not have")
    if len(variant.example) != len(graph.inputs):
        raise ValueError(f"it has {len(variant.example)} examples for {len(graph.inputs)} inputs")
    if why := variant.fits([*variant.example[: len(taken)], *exported.buffers]):
        raise ValueError(f"its examples do not fit: {why}")


#: The greatest example that a plan shows its steps for, in elements.
_MOST_ELEMENTS = 1 << 30


def _zeros(outlines: Sequence[Tensor]) -> list[Tensor]:
    """Inputs of these sizes. Their memory is not used before it is read."""
    import torch

    if any(one.numel() > _MOST_ELEMENTS for one in outlines):
        raise ValueError("its examples are too large")
    return [torch.zeros(one.shape, dtype=one.dtype) for one in outlines]


#: The words a condition may have besides sizes and numbers.
_WORDS = frozenset(["Eq", "Ne", "Mod", "Max", "Min", "FloorDiv", "PythonMod", "CleanDiv", "And", "Or", "Not"])


def _condition(text: str) -> Any:
    """An expression of sizes: names, numbers, arithmetic, comparisons. Nothing else is read."""
    import re

    import sympy

    # sympy evaluates what it reads: only sums, products and comparisons of sizes get there, no powers.
    tokens = re.findall(r"[A-Za-z_]\w*|\d+|\S", text) if len(text) <= 2000 else [""]
    known = (one in _WORDS or re.fullmatch(r"[su]\d{1,9}|\d{1,18}|[()+*/<>=,&|~-]", one) for one in tokens)
    if "**" in text or not all(known):
        raise ValueError(f"the condition {text[:100]!r} is not understood")
    names = {name: sympy.Symbol(name, integer=True) for name in re.findall(r"[su]\d+", text)}
    from torch.utils._sympy import functions

    ours = {word: getattr(functions, word) for word in ("FloorDiv", "Mod", "PythonMod", "CleanDiv")}
    return sympy.sympify(text, locals={**names, **ours})


def _module(model: Any) -> Any:
    import torch

    if isinstance(model, torch.nn.Module):
        return model

    class Function(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

    return Function()


def _parameters(model: Any) -> list[str]:
    function = getattr(model, "forward", model)
    return list(inspect.signature(function).parameters)


def _tensors(tree: Any) -> list[Tensor]:
    import torch
    from torch.utils import _pytree as pytree

    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of some tensors, each in parts of its largest number."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.is_floating_point() and theirs.numel():
            difference, size = (ours.double() - theirs.double()).abs().max(), theirs.double().abs().max()
            worst = max(worst, float(difference / size) if size > 0 else float(difference))
    return worst


def _wants_gradients(inputs: Sequence[Tensor]) -> bool:
    import torch

    return torch.is_grad_enabled() and any(one.requires_grad for one in inputs)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
