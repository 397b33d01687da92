"""Which kernel a call of a compiled graph gets: decided once, while the graph is compiled, without running anything."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from layerzero import _native, control, layouts, loading, torch_state
from layerzero.backends import BACKENDS, UNPROVEN
from layerzero.integrations.torch_operators import kernel_calls
from layerzero.integrations.torch_operators.compositions import FUSED
from layerzero.integrations.torch_operators.fakes import DEFAULT_LAYOUT, SEED_TENSOR
from layerzero.integrations.torch_operators.operators import ATTENTION, LOWERING, Argument, Operator

#: Backends whose kernels are torch code.
TORCH = frozenset(["torch", "torch_cuda", "torch_any", "torch_rocm"])
#: Backends that come along with LayerZero.
SHIPPED = frozenset([*BACKENDS, *UNPROVEN, "lz_cpu"])
#: What a kernel must gain to be worth an operator that the compiler cannot look into: a share of torch's time, and what
#: the call of the operator costs the host, in µs. Under CUDA graphs the host is not there, and a launch that the compiler makes
#: costs it what one of the compiler's own kernels does. Norms, activations and rope are
#: not asked for a gain: what is known is the time of torch's code before it is compiled, and compiled it is one pass over
#: memory, like the kernel. On an H200, blocks with `triton.rope` in them ran at 0.47 of torch's, and at 0.93 to 1.01 in graphs.
SHARE, CALL_US = 0.1, 100.0
#: What attention written in torch costs beyond a kernel that keeps no scores, where neither was timed: the scores are
#: written and read about four times as float32, at this many bytes per µs (4 TB/s, an H200).
_SCORE_BYTES, _BYTES_PER_US = 16.0, 4e6
#: What a kernel that nobody timed loses where the host does not count, because nothing is fused with it, in µs.
_APART_US = 10.0
#: What is left to the compiler on a CPU unless it was timed: torch's code for them is few passes over memory once compiled.
_LEFT_ON_HOST = frozenset([*ATTENTION, "dequantize"])
#: What names a kernel, where the ranking did not choose it.
_NAMED = frozenset(["lock", "override", "pin"])
#: A size that is only known when a graph runs.
_UNKNOWN_SIZE = 1024


@dataclass(frozen=True)
class Choice:
    """What a call becomes."""

    how: str
    """``torch``, ``launch``, ``kernel`` or ``operator``."""
    kernel: str | None
    why: str


_remembered: dict[Any, Choice] = {}
_MOST = 4096


def choose(operator: Operator, args: tuple[Any, ...]) -> tuple[Choice, str]:
    """What a call becomes, and the call in words."""
    loading.load()
    settings = _settings()
    given = zip(operator.arguments, operator.fill(args), strict=True)
    described = tuple(_described(argument.name, value) for argument, value in given if _counts(argument, value))
    frames = control.frames()
    # The engine counts whatever may change a decision.
    state = (_native.status()["version"], frames[0].number if frames else 0, _without_host(), torch_state.sdpa_choice())
    key = (operator.name, described, settings, state)
    choice = _remembered.get(key)
    if choice is None:
        if len(_remembered) >= _MOST:
            _remembered.clear()
        choice = _remembered[key] = _decided(operator, described, dict(settings))
    return choice, _words(described)


def _counts(argument: Argument, value: Any) -> bool:
    """Whether an argument says anything; layouts in force say something too."""
    if argument.name in (LOWERING, DEFAULT_LAYOUT, SEED_TENSOR):
        return False
    return isinstance(value, Tensor) or value != argument.default


def _settings() -> tuple[tuple[str, Any], ...]:
    """The settings that count here."""
    entries = {entry["key"]: entry["value"] for entry in json.loads(_native.settings())["entries"]}
    for frame in reversed(control.frames()):
        entries.update(frame.said)
    names = ("compile.lowering", "checked", "debug", "verify", "default_layout")
    return tuple((name, entries.get(name)) for name in names)


def _without_host() -> bool:
    """Whether the graph becomes a CUDA graph."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def _size(size: Any) -> int:
    if not isinstance(size, SymInt):
        return int(size)
    hint = size.node.hint
    return _UNKNOWN_SIZE if hint is None else int(hint)


def _described(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        shape, strides = tuple(map(_size, value.shape)), tuple(map(_size, value.stride()))
        varies = tuple(isinstance(size, SymInt) for size in value.shape)
        wanted = torch.is_grad_enabled() and value.requires_grad
        return name, value.dtype, shape, strides, str(value.device), wanted, varies
    if isinstance(value, SymInt):
        return name, _size(value)
    if isinstance(value, list | tuple):
        return name, tuple(map(_size, value))
    return name, value


def _words(described: tuple[tuple[Any, ...], ...]) -> str:
    words = []
    for name, value, *rest in described:
        if not rest:
            words.append(f"{name}={value}")
            continue
        sizes = (f"~{size}" if varies else str(size) for size, varies in zip(rest[0], rest[-1], strict=True))
        grad = " grad" if rest[3] else ""
        words.append(f"{name} {str(value).removeprefix('torch.')}[{', '.join(sizes)}]{grad}")
    return " ".join(words)


def _stand_ins(described: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
    """Arguments to ask about: tensors without memory."""
    given: dict[str, Any] = {}
    for name, value, *rest in described:
        if rest:
            shape, strides, device, wanted, _ = rest
            made = torch.empty_strided(shape, strides, dtype=value, device=device)
            given[name] = made.requires_grad_() if wanted else made
        elif name == "window":
            given[name] = value[0] if len(value) == 1 else value
        else:
            given[name] = value
    return given


def _decided(operator: Operator, described: tuple[tuple[Any, ...], ...], settings: dict[str, Any]) -> Choice:
    name = operator.name
    lowering = settings["compile.lowering"] or "auto"
    if lowering == "off":
        return Choice("operator", None, "compile.lowering is off")
    looked_at = [key for key in ("checked", "debug") if settings[key]]
    looked_at += ["verify"] if settings["verify"] == "sample" else []
    if looked_at:
        return Choice("operator", None, f"{looked_at[0]} is on, and looks at every call")
    captured = _without_host()
    try:
        with _disable_current_modes(), FakeTensorMode(), torch.inference_mode(False):
            given = _stand_ins(described)
            report = json.loads(_native.explain_to_compile(name, captured, **given))
            on_host = all(one.device.type == "cpu" for one in given.values() if isinstance(one, Tensor))
            alone = report if captured or on_host else json.loads(_native.explain_to_compile(name, True, **given))
    except Exception as error:  # noqa: BLE001 - the operator says it when it runs
        return Choice("operator", None, f"it cannot be decided yet: {error}".partition("\n")[0])
    times = {candidate["kernel_id"]: candidate["time_us"] for candidate in alone["candidates"]}
    return from_report(report, name, lowering == "always", times, None if on_host else _scores(operator, given))


def _scores(operator: Operator, given: dict[str, Any]) -> float | None:
    """How many scores attention has: batch · heads · queries · keys. `None` of anything else."""
    query, key = given.get("query"), given.get("key")
    if operator.name != "attention" or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return None
    # Of the two sizes in the middle, one is the heads and one the sequence; those of the query count both.
    layout = given.get("layout") or layouts.here(str(operator.layout_setting))
    keys = key.shape[2] if layout == "BHSD" else key.shape[1]
    return float(query.shape[:3].numel() * keys)


def from_report(
    report: dict[str, Any],
    name: str,
    always: bool,
    device_us: dict[str, float | None],
    scores: float | None = None,
) -> Choice:
    """What a call becomes, by what its explanation says of the candidates. `device_us`: by kernel, what the device needs,
    in µs; a compiled graph keeps it busy, so that the host's time does not count. `scores`: how many attention has, on a GPU."""
    chosen = report["chosen"]
    accepted = sorted((c for c in report["candidates"] if c["accepted"]), key=lambda c: int(c["rank"]))
    if chosen is None or not accepted:
        return Choice("operator", None, "no kernel can serve it here")
    first = next(c for c in accepted if c["kernel_id"] == chosen)
    torchs = next((c for c in accepted if c["backend"] in TORCH), None)
    why = report["why"]["message"] if report["why"] else report["basis"]
    if report["pieces"]:
        return Choice("operator", chosen, f"its batch is split into {report['pieces']} pieces")
    by = (report["why"] or {}).get("by")
    if by == "rollout":
        return Choice("operator", chosen, why)
    named = by in _NAMED
    if first["backend"] not in SHIPPED:
        # A plugin's or the program's own: who registers a kernel wants it, and its failures are to be counted.
        return _as_kernel(first, why)
    if first["backend"] in TORCH:
        # A norm or a product is inlined as one writes it in torch; who names another of torch's kernels gets that one.
        other = named and name not in ATTENTION and chosen != report["baseline"]
        return _as_kernel(first, why) if other else _as_torch(first, why)
    if torchs is None or named or _policy(first) > _policy(torchs):
        return _as_kernel(first, why)
    if always:
        return _as_torch(torchs, "compile.lowering is always")
    if name in FUSED:
        return _as_torch(torchs, f"the compiler fuses it with its neighbours, {chosen} would be apart from them")
    free = _without_host() or kernel_calls.traced_of(chosen) is not None
    times = _times(first, torchs, device_us)
    if times is None and first["backend"] == "lz_cpu" and name in _LEFT_ON_HOST:
        return _as_torch(torchs, f"{chosen} was not timed, and an operator costs the host about {CALL_US:.0f} µs")
    if times is None:
        saved = None if scores is None else scores * _SCORE_BYTES / _BYTES_PER_US
        if saved is not None and saved < (_APART_US if free else CALL_US):
            return _as_torch(torchs, f"{chosen} was not timed, and saves about {saved:.0f} µs of the scores' traffic")
        return _as_kernel(first, why)
    ours, theirs = times
    if theirs * (1.0 - SHARE) - ours > (0.0 if free else CALL_US):
        return _as_kernel(first, f"{why}; torch's {torchs['kernel_id']} needs {theirs:.1f} µs, it {ours:.1f} µs")
    return _as_torch(torchs, f"{chosen} gains too little over it: {ours:.1f} µs instead of {theirs:.1f} µs")


def _policy(candidate: dict[str, Any]) -> float:
    return float((candidate["terms"] or {}).get("policy", 0.0))


def _times(
    kernel: dict[str, Any], torchs: dict[str, Any], device_us: dict[str, float | None]
) -> tuple[float, float] | None:
    """What a kernel and torch's need, in µs: the device alone where that is known of both. `None` where neither is."""
    pairs = [
        (device_us.get(kernel["kernel_id"]), device_us.get(torchs["kernel_id"])),
        (kernel["time_us"], torchs["time_us"]),
    ]
    return next(((ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None), None)


def _as_torch(candidate: dict[str, Any], why: str) -> Choice:
    if candidate["transforms"]:
        return Choice("operator", candidate["kernel_id"], f"its arguments need {', '.join(candidate['transforms'])}")
    return Choice("torch", candidate["kernel_id"], why)


def _as_kernel(candidate: dict[str, Any], why: str) -> Choice:
    kernel = candidate["kernel_id"]
    if kernel not in loading.FUNCTIONS:
        return Choice("operator", kernel, why)
    if candidate["transforms"]:
        return Choice("operator", kernel, f"its arguments need {', '.join(candidate['transforms'])}")
    return Choice("kernel", kernel, why)
