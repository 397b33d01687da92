"""Decisions that stay: dispatch tables and lockfiles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from layerzero import _native, devices, fingerprints, loading, models, workloads
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError
from layerzero.inspection import TensorSpec
from layerzero.integrations import transformers_models
from layerzero.printing import visible


class DispatchTable:
    """Which kernel serves which calls, by buckets of sizes; outside of them kernels are selected as always."""

    def __init__(self, text: str, left_out: list[dict[str, Any]], device: str | None = None) -> None:
        self._text = text
        #: What torch calls the device that was decided for.
        self.device = device
        data: dict[str, Any] = json.loads(text)
        #: What the table is of.
        self.model_id: str = data["model_id"]
        #: The hardware it is for.
        self.hardware_signature: str = data["hardware_signature"]
        #: The upper ends of the buckets.
        self.shape_buckets: dict[str, list[int]] = data["shape_buckets"]
        #: The decisions, by bucket.
        self.plans: list[dict[str, Any]] = data["plans"]
        #: Calls that are not in it, each with why.
        self.left_out = left_out

    def to_dict(self) -> dict[str, Any]:
        """The table as data, as its file holds it."""
        data: dict[str, Any] = json.loads(self._text)
        return data

    def save(self, path: str | Path) -> Path:
        """Writes it; ``LAYERZERO_DISPATCH_TABLE`` or the setting ``dispatch_table`` puts it in force."""
        path = Path(path)
        _native.write_file(path, self._text)
        return path

    def load(self) -> list[dict[str, Any]]:
        """Puts it in force in this process; gives the entries that cannot be kept, each with why."""
        mismatches: list[dict[str, Any]] = json.loads(_native.load_table(self._text, f"table of {self.model_id}"))
        fingerprints.said("table", self._text)
        return mismatches

    def __str__(self) -> str:
        where = f" ({self.device})" if self.device else ""
        lines = [f"{self.model_id} on {self.hardware_signature}{where}"]
        for plan in self.plans:
            bucket = ", ".join(f"{name} ≤ {end}" for name, end in plan["bucket"].items())
            where = f"{bucket}: " if bucket else ""
            lines += [f"  {where}{op['op']} → {op['kernel_id']}" for op in plan["ops"]]
        return visible("\n".join(lines))


def solve(
    model: Any,
    *example_inputs: Any,
    shape_buckets: Mapping[str, Sequence[int]],
    compile_jit: bool = True,
    model_id: str | None = None,
    device: Any = None,
    dtype: Any = None,
    **example_kwargs: Any,
) -> DispatchTable:
    """Decides for every call of a model, by buckets of sizes, and gives the decisions as a table.

    The model is traced, without running a kernel, at the end of every bucket: ``seq_len`` is the second size of its
    inputs, ``batch`` the first. Without example inputs ``model.dummy_inputs`` or ``model.example_inputs`` are used.
    A configuration of transformers is traced as by :func:`layerzero.tune`: a prompt and a context of each ``seq_len``.

    Args:
        model: the module; or a transformers configuration, the path of its ``config.json``, or a name (see
            :func:`layerzero.tune`).
        example_inputs: what the module is called with, at any sizes.
        dtype: what the model of a configuration computes in; float32 when not given.
        shape_buckets: the upper ends of the buckets: ``{"seq_len": [128, 512], "batch": [1, 4]}``.
        compile_jit: compile kernels that are compiled on first use for these calls first.
        model_id: what to call the table; the name of the model's class by default.
        device: what to decide for; by default where the model makes its calls, else torch's accelerator in use, else the
            CPU.
    """
    loading.load()
    args, kwargs = example_inputs, example_kwargs
    if transformers_models.named(model):
        if args or kwargs:
            raise ConfigurationError(
                "a configuration and example inputs are given", code="BAD_REQUEST", hint="give one or the other"
            )
        calls, buckets, model_id = _of_configuration(model, shape_buckets, dtype, model_id)
        device = devices.resolve(device)
    else:
        if dtype is not None:
            # The module has a dtype; this is an argument of its own.
            kwargs = {**kwargs, "dtype": dtype}
        if not args and not kwargs:
            args, kwargs = models.examples(model)
        traced, buckets = in_buckets(model, args, kwargs, shape_buckets)
        made = [call for of_bucket in traced for call in of_bucket]
        device = devices.resolve(device, made)
        calls = list(dict.fromkeys(call.spec for call in made))
    if compile_jit:
        from layerzero.warming import warmup

        warmup(calls=calls, device=device)
    return decided(model_id or type(model).__name__, calls, device, buckets)


def _axes(shape_buckets: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    unknown = set(shape_buckets) - {"seq_len", "batch"}
    if unknown or not shape_buckets:
        raise ConfigurationError(
            f"the buckets are {dict(shape_buckets)!r}",
            code="BAD_BUCKETS",
            hint="give the upper ends of 'seq_len', 'batch' or both",
        )
    return {name: sorted(set(ends)) for name, ends in shape_buckets.items()}


def _of_configuration(
    model: Any, shape_buckets: Mapping[str, Sequence[int]], dtype: Any, model_id: str | None
) -> tuple[list[str], dict[str, list[int]], str]:
    """The calls of a transformers configuration at the ends of the buckets, the buckets of all their sizes, and a name."""
    axes = _axes(shape_buckets)
    batch, lengths = axes.get("batch", [1]), axes.get("seq_len") or [*workloads.SEQ]
    traced = workloads.of_model(model, dtype, batch, lengths, lengths)
    rows = {size * length for size in batch for length in (1, *lengths)}
    name = (
        model if isinstance(model, str) and not model.lstrip().startswith("{") else transformers_models.name_of(model)
    )
    return traced.specs(), {**axes, "rows": sorted(rows)}, model_id or name


def in_buckets(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape_buckets: Mapping[str, Sequence[int]]
) -> tuple[list[list[models.Call]], dict[str, list[int]]]:
    """The calls a model makes at the end of each bucket, the largest last, and the buckets of all their sizes."""
    axes = _axes(shape_buckets)
    calls: list[list[models.Call]] = []
    rows: set[int] = set()
    for sizes in product(*axes.values()):
        at = dict(zip(axes, sizes, strict=True))
        resized = [_resized(value, at) for value in args], {k: _resized(v, at) for k, v in kwargs.items()}
        calls.append(models.calls_of(model, *resized[0], **resized[1]))
        rows.add(at.get("seq_len", 1) * at.get("batch", 1))
    # What works on rows (norms, projections) sees all positions of all sequences at once.
    return calls, {**axes, "rows": sorted(rows)}


def decided(model_id: str, calls: Sequence[str], device: str, buckets: dict[str, list[int]]) -> DispatchTable:
    """The table of what selection decides for calls; sizes no bucket is about have those of their operation."""
    text, left_out = _native.solve(model_id, calls, _native.device_number(device), buckets)
    return DispatchTable(text, json.loads(left_out), device)


def _resized(value: Any, at: Mapping[str, int]) -> Any:
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) < 1:
        return value
    sizes = list(shape)
    if "batch" in at:
        sizes[0] = at["batch"]
    if "seq_len" in at and len(sizes) > 1:
        sizes[1] = at["seq_len"]
    return TensorSpec(tuple(sizes), str(value.dtype).removeprefix("torch."), device=str(value.device))


def load_table(path: str | Path) -> list[dict[str, Any]]:
    """Puts a dispatch table in force in this process; gives the entries that cannot be kept, each with why."""
    mismatches: list[dict[str, Any]] = json.loads(_native.load_table(_read(path), str(path)))
    fingerprints.said("table", _read(path))
    return mismatches


def write_lockfile(
    path: str | Path = "layerzero.lock", calls: Iterable[str | Mapping[str, Any]] = (), device: Any = None
) -> Path:
    """Writes the decisions for these calls (all that were measured here when none are given), with their times."""
    loading.load()
    texts = [call if isinstance(call, str) else to_json(call) for call in calls]
    path = Path(path)
    _native.write_file(path, _native.lockfile(texts, devices.number(device)))
    return path


def load_lockfile(path: str | Path = "layerzero.lock") -> list[dict[str, Any]]:
    """Puts the decisions of a lockfile in force in this process; gives those that cannot be kept, each with why."""
    mismatches: list[dict[str, Any]] = json.loads(_native.replay(_read(path), str(path)))
    fingerprints.said("lockfile", _read(path))
    return mismatches


def unpin() -> None:
    """Takes lockfiles and tables back that this process has put in force."""
    _native.unpin()
    fingerprints.said("unpin")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}", code="UNREADABLE_FILE", hint="check the path"
        ) from error
