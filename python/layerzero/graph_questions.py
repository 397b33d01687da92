"""What `explain`, `profile` and `report` of a compiled model return: steps, their times, a report, the error of results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layerzero import _native, checks, devices
from layerzero.graph_answers import GraphReport, GraphStep, TimedStep
from layerzero.results import Rows, rows

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.deciding import Plan
    from layerzero.graph_variants import Variant


def steps(variant: Variant, inputs: Sequence[Tensor]) -> Rows[GraphStep]:
    """The steps for these inputs."""
    return rows((GraphStep(**row) for row in variant.session.steps(variant.laid(inputs))), "steps")


def timed_steps(variant: Variant, inputs: Sequence[Tensor], rounds: int) -> Rows[TimedStep]:
    """The steps for these inputs, and their median times."""
    timed = variant.session.profile(variant.copied(inputs), rounds, variant.host)
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


def trace(timed: Iterable[TimedStep]) -> str:
    """The steps as trace events, one after the other."""
    events, begin = [], 0.0
    for step in timed:
        names = {"kernel": step.kernel, "output": step.output, "origin": step.origin}
        events.append({"name": step.op, "ph": "X", "ts": begin, "dur": step.us, "pid": 1, "tid": 1, "args": names})
        begin += step.us
    return json.dumps({"traceEvents": events})


def page(model: str, timed: Sequence[TimedStep], device: str) -> str:
    """The steps as an HTML page. Floors are shown on the CPU, whose peaks are known."""
    from layerzero import profile_page

    if device == "cpu":
        return profile_page.page(model, devices.cpu_name(), timed, profile_page.ceilings())
    import torch

    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    return profile_page.page(model, name, timed, profile_page.Ceilings(None, None))


def report(
    variants: Sequence[Variant],
    variant: Variant,
    inputs: Sequence[Tensor],
    *,
    model: str,
    largest_error: float | None,
    calls: int,
    model_calls: Mapping[str, int],
) -> GraphReport:
    """What became of a model: counts over all variants, and the steps of one of them for these inputs."""
    session, inputs = variant.session, variant.laid(inputs)
    ran, optimised = session.steps(inputs), session.optimised
    slow = Counter(row["op"] for row in ran if row["kernel"].startswith("reference."))
    return GraphReport(
        model=model,
        nodes_exported=optimised["before"],
        nodes=optimised["after"],
        steps=len(ran),
        rewrites=optimised["rewrites"],
        kernels=dict(Counter(row["kernel"] for row in ran)),
        torch_calls=dict(Counter(call.name for call in variant.exported.host_calls.calls)),
        slow_steps=dict(slow),
        arena_bytes=session.arena(inputs),
        weights=variant.how.weights or "float32",
        precision=variant.how.precision,
        weight_bytes=session.source_bytes,
        packed_bytes=session.packed_bytes,
        largest_error=largest_error,
        exports=len(variants),
        plans=sum(one.session.plans for one in variants),
        calls=calls,
        model_calls=dict(model_calls),
        device=str(variant.device),
        not_captured=[] if isinstance(session, _native.Session) else session.not_captured(inputs),
    )


def report_of_plan(
    plan: Plan, *, model: str, precision: str, calls: int, model_calls: Mapping[str, int]
) -> GraphReport:
    """What became of a model that is not on the CPU: it has decisions, and no graph."""
    return GraphReport(
        model=model,
        nodes_exported=0,
        nodes=0,
        steps=len(plan.decisions),
        rewrites={},
        kernels=dict(Counter(one.kernel_id for one in plan.decisions)),
        torch_calls=plan.torch_calls,
        slow_steps={},
        arena_bytes=0,
        weights="float32",
        precision=precision,
        weight_bytes=0,
        packed_bytes=0,
        largest_error=None,
        exports=0,
        plans=1,
        calls=calls,
        model_calls=dict(model_calls),
    )


def measured_error(
    variant: Variant, inputs: Sequence[Tensor], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    """The largest difference between the results of a graph and those of its model ÷ the largest of the model's results."""
    from layerzero.call_arguments import tensors

    with _unchanged(variant.exported.buffers):
        found = variant.run(variant.copied(inputs))
        expected = model(*_copies(args), **_copies(kwargs))
    return checks.largest_error(tensors(found), tensors(expected))


def _copies(tree: Any) -> Any:
    """The same arguments with copies of the tensors."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, tree)


@contextmanager
def _unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Without gradients. Afterwards the buffers and the state of torch's generator are as before."""
    import torch

    kept = [one.clone() for one in buffers]
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for one, before in zip(buffers, kept, strict=True):
                one.copy_(before)
