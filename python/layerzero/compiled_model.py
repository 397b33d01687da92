"""``lz.compile``: a model as a graph that runs in one native call.

    compiled = lz.compile(model, input_ids)
    logits = compiled(input_ids)

The model is exported by ``torch.export``, its graph is optimised, and each node gets a kernel. A call with other sizes exports the
model again with the sizes that differ as symbols. What cannot be exported, and calls that need gradients, are left to the model.

| files | what is there |
|---|---|
| `compiled_model.py` | `compile`, and `CompiledModel`: what a user can ask of it |
| `served_model.py` | its calls: which graph serves each, when the model is exported, what is left to the model |
| `graph_variants.py` | a model exported for some sizes, and which arguments and sizes it takes |
| `call_exports.py`, `call_arguments.py` | the export for a call; the arguments of calls in one order |
| `graph_questions.py`, `graph_answers.py` | how questions are answered, and what the answers hold |
| `loaded_models.py`, `saved_graphs.py`, `plan_files.py` | `load_plan`; what a plan file says; its bytes |
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

#: What weights can be rounded to.
_NARROW = ("bfloat16", "int8", "int4")


class CompiledModel(ServedModel):
    """A model that runs in one native call. You call it as you call the model, on the CPU and for inference.

    Weights are read where the model has them, but packed copies are made of some. A change of weights is noticed soon after;
    call :meth:`refresh` to have the next call follow it. Results never need gradients; a call whose inputs do, with gradients
    enabled, is the model's own. So is a call under autocast, in a trace or in a transform of ``torch.func``, and of a model in
    training mode. The first call of each kind that is left to the model gives a warning, and ``report().model_calls`` counts them.

    Attributes that it does not have are the model's: ``compiled.config``, ``compiled.state_dict()``.
    """

    def decoder(self) -> Decoder:
        """The graph that :meth:`generate` runs: it is made at its first use, once for all batches and lengths."""
        from layerzero.generating import Decoder

        with self._lock:
            if self._watched is not None:
                self._look(self._watched)
            # A model that was put into training mode is refused there.
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

        The prompt runs at once; each later token is a step over a cache of keys and values, of which only what is written is
        read. Tokens are chosen greedily, or drawn if ``temperature``, ``top_k`` or ``top_p`` is given.

        Args:
            input_ids: prompts (batch, tokens) or (tokens,), a list of prompts of any lengths, or a list of ids.
            max_new_tokens: how many tokens to generate at most.
            attention_mask: 0 where a prompt is padded, as the tokenizer gives it. Padding is on the left. Without it, the
                padding token is padding if it is not also one that ends a text.
            temperature: scores are divided by it; 0 is greedy.
            top_k: draw among so many tokens with the largest scores.
            top_p: draw among the most likely tokens that together have this probability.
            seed: makes the draws the same at every call.
            generator: torch's generator to draw with, in the place of a seed.
            eos_token_id: ids that end a sequence; without it those of the model, if it has any. An empty list is none.
            pad_token_id: what pads prompts, and follows the end of a sequence while others go on; without it that of the
                model, or the first id of the end.
            num_return_sequences: generate so many for each prompt.
            on_token: called with the new tokens (batch,) after each step. Generating ends where it returns ``False``. It may
                generate too: calls at once have a cache each.
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
        """Forgets everything that was made of the weights. The next call exports the model again."""
        self._forget()

    def explain(self, *args: Any, **kwargs: Any) -> Rows[GraphStep]:
        """The steps for some inputs, or those of the first call: which kernel runs each, and which others could."""
        return graph_questions.steps(*self._variant(args, kwargs))

    def report(self, *args: Any, **kwargs: Any) -> GraphReport:
        """What became of the model, for some inputs or those of the first call."""
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
        """How far results for the first inputs are from those of the model: the largest difference ÷ the largest number.

        It is known for narrow ``weights``, and measured at the first use. None without them.
        """
        if self._how.weights is None or self._error is not None or self._example is None or self.model is None:
            return self._error
        args, kwargs = self._example
        variant, inputs = self._variant(args, kwargs)
        self._error = graph_questions.measured_error(variant, inputs, self.model, args, kwargs)
        return self._error

    def profile(self, *args: Any, rounds: int = 20, **kwargs: Any) -> Rows[TimedStep]:
        """The median time of each step, over some runs."""
        return graph_questions.timed_steps(*self._variant(args, kwargs), rounds)

    def save_trace(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as trace events, which ``chrome://tracing`` and Perfetto show."""
        Path(path).write_text(graph_questions.trace(self.profile(*args, rounds=rounds, **kwargs)))
        return Path(path)

    def save_profile(self, path: str | Path, *args: Any, rounds: int = 20, **kwargs: Any) -> Path:
        """Writes :meth:`profile` as an HTML page: steps by their time, kernels, and floors where the machine's peaks are known."""
        text = graph_questions.page(self._name, self.profile(*args, rounds=rounds, **kwargs))
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def graph(self, form: str = "text") -> str:
        """The optimised graph: as ``text``, a node a line, or as ``dot`` for Graphviz."""
        if form not in ("text", "dot"):
            raise InvalidCallError(f"form is {form!r}, expected 'text' or 'dot'", code="BAD_PARAM")
        variant, _ = self._variant((), {})
        found: str = variant.session.text() if form == "text" else variant.session.dot()
        return found

    def save(self, path: str | Path) -> Path:
        """Writes the compiled model to a file, weights included. :func:`load_plan` reads it without the model's code."""
        from layerzero import saved_graphs

        self._variant((), {})
        variants = self._variants
        # The first of those that serve the most.
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
        """Puts the model in evaluation mode, in which its calls are compiled. Gives the compiled model."""
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
            # `.to(…)`, `.train()`, `.requires_grad_()` give the model itself.
            result = found(*args, **kwargs)
            return self if result is model else result

        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """A copy of the model, which is compiled at its first call."""
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
