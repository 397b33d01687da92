"""``lz.compile``: a model as a graph that runs in one native call.

    compiled = lz.compile(model, input_ids)
    logits = compiled(input_ids)

``torch.export`` exports the model, its graph is optimised, and each node gets a kernel. A call with other sizes exports the model
again, with the sizes that differ as symbols. Calls that no graph can serve, for example those that need gradients, run the model
itself.

| files | what is there |
|---|---|
| `compiled_model.py` | `compile` and `CompiledModel`: its methods for users |
| `served_model.py` | its calls: which graph serves each, when the model is exported, which calls run the model itself |
| `graph_variants.py` | a variant: the model exported for some sizes, and which arguments and sizes it fits |
| `call_exports.py`, `call_arguments.py` | exporting the model for a call; the arguments of a call in a fixed order |
| `planned_graphs.py` | `dry_run` and `solve` of compiled models |
| `graph_questions.py`, `graph_answers.py` | how `explain`, `profile` and `report` are made; the classes they return |
| `loaded_models.py`, `saved_graphs.py`, `plan_files.py` | `load_plan`; the fields of a plan file; its bytes |
| `watched_weights.py` | whether weights changed |
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero import devices, graph_questions, loading
from layerzero.errors import InvalidCallError, warn
from layerzero.graph_answers import GraphReport, GraphStep, TimedStep
from layerzero.graph_variants import outline
from layerzero.results import Rows
from layerzero.served_model import ServedModel

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.generating import Decoder

#: The narrow formats of weights.
_NARROW = ("bfloat16", "int8", "int4")


class CompiledModel(ServedModel):
    """A model that runs in one native call, or on a GPU as a CUDA graph. You call it as you call the model, for inference.

    Some calls run the model itself: if an input requires gradients and gradients are enabled, in training mode, under autocast,
    and in a trace or a transform of ``torch.func``. The first call of each kind gives a warning, and ``report().model_calls``
    counts them.

    Weights are not copied, except those that are packed. LayerZero notices soon when weights change; call :meth:`refresh` to use
    the new ones from the next call on.

    All other attributes are the model's: ``compiled.config``, ``compiled.state_dict()``.
    """

    def decoder(self) -> Decoder:
        """The graph that :meth:`generate` runs, made at the first use. One graph serves all batches and lengths."""
        from layerzero.generating import Decoder

        with self._lock:
            if self._watched is not None:
                self._look(self._watched)
            # `Decoder` raises the error for a model in training mode.
            if self._decoder is None or getattr(self.model, "training", False):
                decoder = Decoder(self.model, self._how, self._shared())
                self._watch([*self._variants, *decoder._compiled._variants])
                self._decoder = decoder
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

        All tokens of a prompt run in one step; each later token is a step that reads a cache of keys and values. Tokens are
        sampled if you pass ``temperature``, ``top_k`` or ``top_p``; else the most likely token is taken.

        Args:
            input_ids: prompts (batch, tokens) or (tokens,), a list of prompts of any lengths, or a list of ids.
            max_new_tokens: how many tokens to generate at most.
            attention_mask: 0 where a prompt is padded, as the tokenizer returns it. Padding must be on the left. Without a mask,
                ids equal to ``pad_token_id`` are padding, unless that id also ends texts.
            temperature: logits are divided by it; 0 is greedy.
            top_k: sample among the ``top_k`` tokens with the largest logits.
            top_p: sample among the most likely tokens that together have this probability.
            seed: the same seed samples the same tokens at every call.
            generator: a generator of torch to sample with, instead of a seed.
            eos_token_id: ids that end a sequence; by default those of the model. An empty list: none.
            pad_token_id: the id of padding before prompts and after the end of a sequence; by default that of the model, or the
                first of the ids that end a sequence.
            num_return_sequences: how many texts to generate for each prompt.
            on_token: called with the new token of each sequence, (batch,), after each step. Generating ends when it returns
                ``False``. It may call ``generate`` itself: calls that run at the same time have a cache each.
        """
        from layerzero.generating import loop, sampling

        choose = sampling.choice(temperature, top_k, top_p, seed, generator)
        several = num_return_sequences
        if isinstance(several, bool) or not isinstance(several, int) or several < 1:
            text = f"num_return_sequences is {several!r}, expected 1 or more"
            raise InvalidCallError(text, code="BAD_PARAM", hint="leave it out for one text of each prompt")
        decoder = self.decoder()
        ending = loop.ends(self.model, eos_token_id)
        pad = loop.padding(self.model, pad_token_id, ending)
        ids, firsts = loop.prompt(input_ids, attention_mask, pad, ending)
        if several != 1:
            ids, firsts = (one.repeat_interleave(several, 0) for one in (ids, firsts))
        return loop.generate(decoder, ids, firsts, max_new_tokens, choose, ending, pad, on_token)

    def refresh(self) -> None:
        """Discards the graphs and the packed weights. The next call exports the model again."""
        self._forget()

    def explain(self, *args: Any, **kwargs: Any) -> Rows[GraphStep]:
        """The steps for these inputs (by default those of the first call): the kernel of each, and the other candidates."""
        return graph_questions.steps(*self._variant(args, kwargs))

    def report(self, *args: Any, **kwargs: Any) -> GraphReport:
        """What became of the model: nodes, kernels and memory for these inputs (by default those of the first call), and counts."""
        if (plan := self._decided) is not None:
            return graph_questions.report_of_plan(
                plan,
                model=self._name,
                precision=self._how.precision,
                calls=self._calls,
                model_calls=self._left,
            )
        variant, inputs = self._variant(args, kwargs)
        return graph_questions.report(
            self._variants,
            variant,
            inputs,
            model=self._name,
            largest_error=self.largest_error(),
            calls=self._calls,
            model_calls=self._left,
        )

    def largest_error(self) -> float | None:
        """With narrow ``weights``: the largest difference to the model's results for the first inputs ÷ the largest of these.

        It is measured at the first use. ``None`` without narrow weights.
        """
        if self._how.weights is None or self._error is not None or self._example is None or self.model is None:
            return self._error
        args, kwargs = self._example
        variant, inputs = self._variant(args, kwargs)
        self._error = graph_questions.measured_error(variant, inputs, self.model, args, kwargs)
        return self._error

    def profile(self, *args: Any, rounds: int = 20, **kwargs: Any) -> Rows[TimedStep]:
        """The median time of each step over ``rounds`` runs."""
        return graph_questions.timed_steps(*self._variant(args, kwargs), rounds)

    def save_trace(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as trace events, which ``chrome://tracing`` and Perfetto show."""
        Path(path).write_text(graph_questions.trace(self.profile(*args, rounds=rounds, **kwargs)))
        return Path(path)

    def save_profile(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as an HTML page: the steps, slowest first, and the time of each kernel."""
        timed = self.profile(*args, rounds=rounds, **kwargs)
        where = str(self._variant(args, kwargs)[0].device)
        text = graph_questions.page(self._name, timed, where)
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def graph(self, form: str = "text") -> str:
        """The optimised graph: as ``text``, one node in each line, or as ``dot`` for Graphviz."""
        if form not in ("text", "dot"):
            raise InvalidCallError(f"form is {form!r}, expected 'text' or 'dot'", code="BAD_PARAM")
        variant, _ = self._variant((), {})
        found: str = variant.session.text() if form == "text" else variant.session.dot()
        return found

    def save(self, path: str | Path) -> Path:
        """Writes the compiled model to a file, weights included. :func:`load_plan` reads it without the model's code."""
        from layerzero import saved_graphs

        if self._variant((), {})[0].device.type != "cpu":
            raise InvalidCallError(
                f"{self._name} is compiled for {self._variants[0].device}, and files are for the CPU",
                code="NOT_EXPORTABLE",
                hint="compile it on the CPU to save it; on a device, compile the model again",
            )
        variants = self._variants
        # The variant that serves the most of the others' first calls.
        variant = max(variants, key=lambda one: sum(map(one.serves, variants)))
        if left_out := [one for one in self._variants if not variant.serves(one)]:
            warn(
                f"the file of {self._name} has one of its {len(self._variants)} exports, which does not serve "
                f"{'; '.join(', '.join(map(outline, one.example)) for one in left_out)}. Name sizes that differ in dynamic_shapes"
            )
        saved = saved_graphs.SavedGraph(self._name, devices.cpu_name(), self._signature, variant)
        return saved_graphs.write(path, saved)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name}: {len(self._variants)} exports, {self._calls} calls>"

    def eval(self) -> CompiledModel:
        """Puts the model in evaluation mode and returns the compiled model."""
        if hasattr(self.model, "eval"):
            self.model.eval()
        return self

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is None or name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        found = getattr(model, name)
        if not inspect.ismethod(found) or found.__self__ is not model:
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            # `.to(…)`, `.train()`, `.requires_grad_()` return the model itself.
            result = found(*args, **kwargs)
            return self if result is model else result

        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """A copy with a copy of the model. It is compiled at its first call."""
        how = self._how
        copied = CompiledModel.__new__(CompiledModel)
        memo[id(self)] = copied
        CompiledModel.__init__(
            copied,
            copy.deepcopy(self.model, memo),
            dynamic_shapes=self._dynamic_shapes,
            strict=self._strict,
            **asdict(how),
        )
        copied._precise = self._precise
        return copied

    def __reduce__(self) -> Any:
        raise TypeError("a compiled model cannot be pickled: save() writes it to a file, and lz.load_plan reads that")


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

    The model is exported for the example inputs, or at the first call if you pass none. Calls with other sizes work too.

    Args:
        model: a module in evaluation mode, or a function of tensors.
        example_inputs: positional arguments of a call.
        kwargs: keyword arguments of that call.
        dynamic_shapes: which sizes may differ, in the form ``torch.export`` takes. Without it, LayerZero finds out from the calls.
        tune: time the candidate kernels of each node inside the graph, and take the fastest.
        off: names of optimisation passes to leave out.
        strict: raise an error if a call of the model would stay torch's.
        weights: keep the weights of linear layers as ``"bfloat16"``, ``"int8"`` or ``"int4"``, rounded as :func:`pack` does it.
            Results differ from the model's; ``report().largest_error`` says how much. The model keeps its own weights.
        precision: how exactly float32 products are computed; by default the setting of ``torch.set_float32_matmul_precision``.
            ``"highest"``: as exactly as in float32. On a CPU with a matrix unit for bfloat16, a float32 number may be split into
            three bfloat16 numbers, which hold all its bits. ``"high"`` or ``"medium"``: into two, which hold 16 of its 24 bits.
            ``"float32"``: nothing is split.
    """
    if weights not in (None, *_NARROW):
        raise InvalidCallError(
            f"weights is {weights!r}, expected one of {', '.join(_NARROW)}",
            code="BAD_PARAM",
            hint="leave it out to keep the model's numbers",
        )
    precise, precision = precision is not None, _precision(precision)
    loading.load()
    if not callable(model):
        raise InvalidCallError(
            f"{type(model).__name__} cannot be called", code="NOT_A_MODEL", hint="pass a torch.nn.Module or a function"
        )
    compiled = CompiledModel(
        model, dynamic_shapes=dynamic_shapes, tune=tune, off=off, strict=strict, weights=weights, precision=precision
    )
    compiled._precise = precise
    if example_inputs or kwargs:
        compiled._prepare(example_inputs, dict(kwargs or {}))
    return compiled


def _precision(asked: str | None) -> str:
    """The precision of float32 products: the one that was asked for, else torch's setting."""
    import torch

    if asked not in (None, "float32", "highest", "high", "medium"):
        raise InvalidCallError(
            f"precision is {asked!r}, expected 'float32', 'highest', 'high' or 'medium'",
            code="BAD_PARAM",
            hint="leave it out to follow torch.set_float32_matmul_precision",
        )
    found = asked or torch.get_float32_matmul_precision()
    return "high" if found == "medium" else found
