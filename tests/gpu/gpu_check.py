"""Runs a call by every kernel that takes it, and holds each result to what is wanted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gpu_cases
import gpu_rows
import layerzero as lz
import torch
from gpu_cases import Call, Draw, Want
from torch import Tensor

FAMILIES: dict[str, tuple[Callable[[Draw], Call], int]] = {**gpu_cases.FAMILIES, **gpu_rows.FAMILIES}
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 0.125,
    torch.float8_e5m2: 0.25,
}
OPERATIONS = {
    "cross_attention": "attention.cross",
    "attention_lse": "attention.lse",
    "varlen_attention_lse": "attention.lse.varlen",
    "paged_attention_lse": "attention.lse.paged",
    "merge_states": "attention.merge",
    "varlen_attention": "attention.varlen",
    "paged_attention": "attention.paged",
    "mla_attention": "attention.mla",
    "sparse_attention": "attention.sparse",
}
#: Only kernels whose ids begin with one of these, for a quick look at one library: LZ_GPU_KERNELS=torch.cuda,triton.
WANTED = tuple(filter(None, os.environ.get("LZ_GPU_KERNELS", "").split(",")))

#: Only attention of one head size and dtype, and "plain" without window or softcap, for a library that compiles long for
#: every other kind: LZ_GPU_KIND=128,bfloat16 or LZ_GPU_KIND=128,bfloat16,plain.
KIND = os.environ.get("LZ_GPU_KIND", "")


def looked_at(call: Call) -> bool:
    """Whether a call is of the kind that is to be looked at."""
    query = call.kwargs.get("query", call.kwargs.get("q_nope"))
    if not KIND or not isinstance(query, Tensor):
        return not KIND
    kind = f"{query.shape[-1]},{str(query.dtype).removeprefix('torch.')}"
    plain = call.kwargs.get("window") is None and not call.kwargs.get("softcap")
    return kind == KIND or (plain and f"{kind},plain" == KIND)


@cache
def kernels(operation: str) -> tuple[str, ...]:
    """The kernels of an operation for this GPU that are to be looked at."""
    here = [k for k in lz.list_kernels(operation) if k.available and "cuda" in k.platforms]
    return tuple(k.kernel_id for k in here if not WANTED or k.kernel_id.startswith(WANTED))


def taking(call: Call) -> list[str]:
    """The kernels that take a call."""
    operation = lz.which(OPERATIONS.get(call.function, call.function), **call.kwargs).op
    return [kernel for kernel in kernels(operation) if lz.validate(kernel, **call.kwargs)[0]]


def fresh(call: Call) -> dict[str, Any]:
    """The arguments, with copies of those that are written to."""
    return {k: v.clone() if k in call.updated else v for k, v in call.kwargs.items()}


def results(call: Call, run: Callable[..., Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call gives, or what it has written to."""
    got = run(**kwargs)
    if call.updated:
        return [kwargs[name] for name in call.updated]
    return list(got) if isinstance(got, tuple | list) else [got]


def wanted(call: Call) -> list[Want]:
    """What a call must give."""
    if call.want is not None:
        return call.want
    on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in fresh(call).items()}
    operation = lz.which(OPERATIONS.get(call.function, call.function), **on_cpu).op
    given = results(call, lambda **kw: lz.run_kernel(f"lz_cpu.ref.{operation}", **kw), on_cpu)
    return [Want(one, exact=not one.is_floating_point() or one.element_size() == 1) for one in given]


def difference(got: Tensor, want: Want) -> str | None:
    """What is wrong with a result, if anything."""
    right = want.values.to(got.device).double()
    values = got.double()
    if values.shape != right.shape:
        return f"has shape {list(values.shape)}, not {list(right.shape)}"
    if want.exact:
        wrong = ~((values == right) | (values.isnan() & right.isnan()))
    else:
        unit = 2.0**-53 if got.dtype == torch.float64 else 2.0**-24
        growth = want.growth.to(got.device) if isinstance(want.growth, Tensor) else want.growth
        allowed = TOLERANCE[got.dtype] * (1.0 + right.abs()) + unit * growth
        # What is not a number is not within any bound.
        wrong = ~((values - right).abs() <= allowed) & ~(values.isnan() & right.isnan())
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    worst = float((values - right).abs().nan_to_num(torch.inf)[wrong].max())
    count = f"{int(wrong.sum())} of {wrong.numel()} are wrong, by up to {worst:.3g}"
    return f"is {float(values[at]):.9g} at {at}, not {float(right[at]):.9g}; {count}"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)


class Held:
    """What was run, and what was wrong."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.problems: list[str] = []

    def check(self, call: Call) -> None:
        """The chosen kernel and every other that takes the call give what is wanted, and touch nothing else."""
        want = wanted(call)
        before = {k: v.clone() for k, v in call.kwargs.items() if isinstance(v, Tensor) and k not in call.updated}
        runs: list[tuple[str, Callable[..., Any]]] = []
        if not WANTED:
            runs.append(("chosen", getattr(lz, call.function)))
        for kernel in taking(call):
            self.reached[kernel] += 1
            runs.append((kernel, partial(lz.run_kernel, kernel)))
        for name, run in runs:
            self.hold(name, call, partial(results, call, run, fresh(call)), want)
        for name, was in before.items():
            if not _same(call.kwargs[name], was):
                self.problems.append(f"{call}: '{name}' was written to")

    def hold(self, name: str, call: Call, run: Callable[[], list[Tensor]], want: list[Want]) -> None:
        """Runs, and notes what is wrong."""
        try:
            got = run()
            torch.cuda.synchronize()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            self.problems.append(f"{name}: {call}: raised {type(error).__name__}: {first}")
            if "CUDA error" in str(error) and "captur" not in str(error):
                # Nothing runs on this device any more.
                raise RuntimeError(self.report()) from error
            return
        if len(got) != len(want):
            self.problems.append(f"{name}: {call}: gave {len(got)} results")
            return
        for i, (one, right) in enumerate(zip(got, want, strict=True)):
            if (wrong := difference(one, right)) is not None:
                self.problems.append(f"{name}: {call}: result {i} {wrong}")

    def report(self) -> str:
        """The problems, one of each kernel first."""
        by_kernel = Counter(problem.partition(":")[0] for problem in self.problems)
        first = {problem.partition(":")[0]: problem for problem in reversed(self.problems)}.values()
        counts = ", ".join(f"{name} {count}" for name, count in by_kernel.most_common())
        return "\n".join([f"{len(self.problems)} problems: {counts}", *first, *self.problems[:20]])
