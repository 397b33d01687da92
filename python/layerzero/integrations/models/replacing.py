"""Modules of a model that are an operation of LayerZero: found by what they are made of, proven by numbers.

A module becomes a candidate by its structure: which parameters, children and constants it has. It is replaced only if
the operation gives the module's own result on random numbers of several sizes, in the module's dtype and on its device,
outside of training. Where the module depends on training, its own forward runs in training. What is replaced is the ``forward`` of the instance: hooks, parameters and the class stay as they are.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from layerzero._native import gelu, layer_norm, rms_norm, silu_mul

__all__ = ["Match", "bind", "close", "is_replaced", "match", "scale_of", "unbind"]

Forward = Callable[..., torch.Tensor]

#: Names of the number that is added to the mean square.
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
#: Names of a gated MLP's projections: gate, up, down. One of None: gate and up are the halves of the first.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", None, "down_proj"))
#: What the forward of a gated MLP may call besides: gate and up are halves, and the activation may be a function.
_HARMLESS = frozenset(["chunk", "silu"])
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")

#: Relative difference that rounding explains: some modules round twice where the operation rounds once.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Match:
    """What a module is, and the function that computes the same."""

    #: What it is: "RMS norm", "layer norm", "SwiGLU", "GELU".
    kind: str
    #: The operation's function.
    operation: str
    forward: Forward
    #: Size of the last dimension of the module's input.
    width: int
    #: Size of the last dimension of the operation's operands; None where the module does not say it.
    operated: int | None


def match(module: nn.Module) -> Match | str | None:
    """What to replace a module by; why it is not replaced; None where it is no operation at all."""
    for recognize in (_layer_norm, _rms_norm, _gelu, _swiglu, _of_diffusers):
        forms = recognize(module)
        if forms is None:
            continue
        if isinstance(forms, str):
            return forms
        if is_replaced(module):
            return "its forward was replaced before"
        if (why := _not_checkable(module)) is not None:
            return why
        return _proven(module, forms)
    return None


def _proven(module: nn.Module, forms: list[Match]) -> Match | str:
    """The form that gives the module's own numbers."""
    worst = float("inf")
    for form in forms:
        try:
            apart = _apart(module, form)
        # A forward for other shapes raises whatever it raises.
        except Exception as error:  # noqa: BLE001
            return f"could not be compared: {type(error).__name__}: {error}"
        if apart is None:
            return "gives no numbers that could be compared"
        if apart <= 1.0:
            return replace(form, forward=_own_in_training(form.forward)) if _depends_on_training(module) else form
        worst = min(worst, apart)
    dtype = str(_dtype(module)).removeprefix("torch.")
    return f"computes something else: {worst:.1e} times the tolerance of {dtype} apart"


@torch.no_grad()
def _apart(module: nn.Module, form: Match) -> float | None:
    """The largest difference between a module and a form, in tolerances; None where the module gives no numbers."""
    device, dtype = _device(module), _dtype(module)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    probe = module
    if form.kind in ("RMS norm", "layer norm"):
        # With other weights: those of a new model are all ones or zeros, which several forms agree on.
        probe = copy.deepcopy(module)
        for parameter in probe.parameters():
            parameter.copy_(numbers(*parameter.shape) * 0.5 + 0.7)
    was = [(part, part.training) for part in probe.modules()]
    probe.eval()
    try:
        found = [_difference(probe, form, numbers(2, 3, form.width) * size) for size in _sizes(module)]
    finally:
        for part, training in was:
            part.training = training
    compared = [apart for apart in found if apart is not None]
    return max(compared) if compared else None


def _sizes(module: nn.Module) -> tuple[float, ...]:
    """Standard deviations of the inputs: where epsilon counts, usual ones, and where a limit would be reached."""
    epsilon = next((vars(module)[name] for name in _EPSILONS if isinstance(vars(module).get(name), float)), 0.0)
    return (*([math.sqrt(epsilon)] if epsilon > 0 else []), 2.0, 1e2, 1e4)


def _difference(probe: nn.Module, form: Match, x: torch.Tensor) -> float | None:
    """The largest difference for one input, in tolerances; None where the module's own result is not finite."""
    theirs, ours = type(probe).forward(probe, x), form.forward(probe, x)
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return float("inf")
    a, b = theirs.double(), ours.double()
    if not bool(a.isfinite().all()):
        return None
    largest = float(a.abs().max())
    if largest == 0 or not bool(b.isfinite().all()):
        return 0.0 if torch.equal(a, b) else float("inf")
    # After a matrix product rounding errors are those of its terms, whatever is left of their sum.
    floor = 0.5 if _has(probe.children()) else 0.05
    return float(((a - b).abs() / (a.abs() + floor * largest)).max()) / _TOLERANCE[x.dtype]


def _depends_on_training(module: nn.Module) -> bool:
    """Whether its result may be another one in training: it was compared outside of it."""
    source = _source(module)
    names = [type(part).__name__ for part in module.modules()]
    return (
        source is None
        or "training" in source
        or "drop" in source.lower()
        or any("drop" in name.lower() for name in names)
    )


def _own_in_training(forward: Forward) -> Forward:
    """A forward that is the class's own while the module, or a part of it, is in training."""

    def evaluated(self: Any, x: torch.Tensor) -> torch.Tensor:
        if any(part.training for part in self.modules()):
            return type(self).forward(self, x)  # type: ignore[no-any-return]
        return forward(self, x)

    if (scale := getattr(forward, "scale", None)) is not None:
        evaluated.scale = scale  # type: ignore[attr-defined]
    return evaluated


def _source(module: nn.Module) -> str | None:
    """The source of its class's forward, without indentation."""
    try:
        return textwrap.dedent(inspect.getsource(type(module).forward))
    except (OSError, TypeError):
        return None


def close(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether two results differ by rounding only."""
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    a, b = theirs.double(), ours.double()
    return bool(((a - b).abs() <= _TOLERANCE[theirs.dtype] * (a.abs() + 0.05 * a.abs().max())).all())


def _not_checkable(module: nn.Module) -> str | None:
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        return "has no numbers to compare (on the meta device)"
    if _dtype(module) not in _TOLERANCE:
        return f"has parameters of {str(_dtype(module)).removeprefix('torch.')}"
    return None


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _has(things: Iterator[object]) -> bool:
    return next(things, None) is not None


def _one_argument(module: nn.Module) -> bool:
    """Whether forward is a function of one tensor."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )


# Norms.


def _layer_norm(module: nn.Module) -> list[Match] | None:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return None
    return [Match("layer norm", "layer_norm", _layer_norm_forward, *module.normalized_shape * 2)]


def _layer_norm_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer_norm(input, None, self.weight, self.bias, self.eps)
    return out


def _rms_norm(module: nn.Module) -> list[Match] | str | None:
    name = type(module).__name__.lower()
    if "norm" not in name or type(module).__module__.startswith("torch.nn.modules.") and "rms" not in name:
        return None
    own = dict(module.named_parameters(recurse=False))
    if _has(module.children()) or not own.keys() <= {"weight"} or _has(module.buffers(recurse=False)):
        return None
    epsilons = [name for name in _EPSILONS if isinstance(vars(module).get(name), float)]
    if "weight" not in own or own["weight"].dim() != 1 or len(epsilons) != 1:
        return "a norm without a weight of one dimension and an epsilon" if "rms" in name else None
    if not _one_argument(module):
        return "a norm of more than one argument"
    width = own["weight"].shape[0]
    return [
        Match("RMS norm", "rms_norm", make(epsilons[0]), width, width)
        for make in (_scaled_by_weight, _scaled_by_one_plus)
    ]


def _scaled_by_weight(epsilon: str) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype is not weight.dtype:
            # Modules differ in the dtype they give then.
            return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
        out: torch.Tensor = rms_norm(hidden_states, weight, getattr(self, epsilon))
        return out

    forward.scale = lambda self: (self.weight, getattr(self, epsilon))  # type: ignore[attr-defined]
    return forward


def _scaled_by_one_plus(epsilon: str) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype is not weight.dtype:
            return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
        return rms_norm(hidden_states, _one_plus(weight), getattr(self, epsilon))

    forward.scale = lambda self: (_one_plus(self.weight), getattr(self, epsilon))  # type: ignore[attr-defined]
    return forward


def scale_of(module: Any) -> Callable[[Any], tuple[torch.Tensor, float]] | None:
    """What gives the weight and epsilon of an RMS norm that was replaced here; None of any other module."""
    function = getattr(getattr(module, "__dict__", {}).get("forward"), "__func__", None)
    return getattr(function, "scale", None)


def _one_plus(weight: torch.Tensor) -> torch.Tensor:
    """1 + weight in float32 or wider. Not kept: a write to ``weight.data`` leaves no trace."""
    return 1.0 + weight.to(torch.float64 if weight.dtype is torch.float64 else torch.float32)


# Activations and gated MLPs.


def _gelu(module: nn.Module) -> list[Match] | None:
    if "gelu" not in type(module).__name__.lower() or _has(module.parameters()) or _has(module.children()):
        return None
    if not _one_argument(module):
        return None
    return [Match("GELU", "gelu", forward, 64, None) for forward in (_gelu_exact, _gelu_tanh)]


def _gelu_exact(self: Any, input: torch.Tensor) -> torch.Tensor:
    return gelu(input)


def _gelu_tanh(self: Any, input: torch.Tensor) -> torch.Tensor:
    return gelu(input, "tanh")


def _swiglu(module: nn.Module) -> list[Match] | str | None:
    children = dict(module.named_children())
    for gate, up, down in _GATED:
        if all(name in children for name in (gate, up, down) if name is not None):
            break
    else:
        return None
    activation = next((getattr(module, name, None) for name in _ACTIVATIONS if hasattr(module, name)), None)
    if activation is None or not _is_silu(activation):
        return (
            None if activation is None else "a gated MLP of another activation: its activation is looked at by itself"
        )
    linears = [children[name] for name in (gate, up, down) if name is not None]
    if not all(isinstance(child, nn.Linear) for child in linears):
        return f"its projections are {type(linears[0]).__name__}, not Linear"
    if not _one_argument(module):
        return "a gated MLP of more than one argument"
    known = {name for name in (gate, up, down, *_ACTIVATIONS) if name is not None}
    if (more := _does_more(module, known)) is not None:
        return more
    width, inner = linears[0].in_features, linears[-1].in_features
    assert isinstance(width, int) and isinstance(inner, int)
    if up is not None:
        return [Match("SwiGLU", "silu_mul", _gated(gate, up, down), width, inner)]
    return [Match("SwiGLU", "silu_mul", _gated_halves(gate, down, first), width, inner) for first in (True, False)]


def _does_more(module: nn.Module, known: set[str]) -> str | None:
    """What the source of a gated MLP does besides its products and activation: a limit may lie beyond every comparison."""
    source = _source(module)
    if source is None:
        return "a gated MLP whose source cannot be read"
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return "a gated MLP whose source cannot be read"
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [node.attr if isinstance(node, ast.Attribute) else ast.unparse(node) for node in called]
    # Dropout does nothing outside of training.
    other = [name for name in names if name not in known | _HARMLESS and "drop" not in name.lower()]
    return f"a gated MLP that also calls {other[0]}" if other else None


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-4, 4, 9)
    try:
        return bool(torch.allclose(activation(x), torch.nn.functional.silu(x)))
    # Whatever another kind of activation raises.
    except Exception:  # noqa: BLE001
        return False


def _gated(gate: str, up: str, down: str) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, down)(silu_mul(getattr(self, gate)(x), getattr(self, up)(x)))  # type: ignore[no-any-return]

    return forward


def _gated_halves(both: str, down: str, first: bool) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = getattr(self, both)(x).chunk(2, dim=-1)
        return getattr(self, down)(silu_mul(a, b) if first else silu_mul(b, a))  # type: ignore[no-any-return]

    return forward


def _of_diffusers(module: nn.Module) -> list[Match] | str | None:
    """Activations of diffusers, each with the projection before it."""
    if type(module).__module__ != "diffusers.models.activations":
        return None
    name, proj = type(module).__name__, getattr(module, "proj", None)
    if name not in ("GELU", "GEGLU", "SwiGLU"):
        return None
    if name == "GEGLU":
        return "LayerZero has no operation for GEGLU: torch's GELU and product run"
    if not isinstance(proj, nn.Linear):
        return f"its projection is {type(proj).__name__}, not Linear"
    width, inner = proj.in_features, proj.out_features
    if name == "SwiGLU":
        return [Match("SwiGLU", "silu_mul", _projected_swiglu, width, inner // 2)]
    return [Match("GELU", "gelu", forward, width, inner) for forward in (_projected_gelu, _projected_gelu_tanh)]


def _projected_swiglu(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    up, gate = self.proj(hidden_states).chunk(2, dim=-1)
    out: torch.Tensor = silu_mul(gate, up)
    return out


def _projected_gelu(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = gelu(self.proj(hidden_states))
    return out


def _projected_gelu_tanh(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = gelu(self.proj(hidden_states), "tanh")
    return out


# Instances.


def bind(module: nn.Module, forward: Forward) -> None:
    """Gives an instance a forward of its own. A method, so that a copy of the module gets one of its own too.

    pickle stores a method by its name, and looks the name up when it is loaded: then the module runs its class's forward.
    """
    forward.__name__ = "forward"
    module.__dict__["forward"] = types.MethodType(forward, module)


def unbind(module: nn.Module) -> None:
    """The forward of the class again."""
    module.__dict__.pop("forward", None)


def is_replaced(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own. One that was pickled has that of its class."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward
