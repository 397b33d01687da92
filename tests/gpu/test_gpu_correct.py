"""Every kernel for the GPU, on calls at random, against float64; and in CUDA graphs.

Run it with ``PYTHONPATH=python pytest --confcutdir=tests/gpu tests/gpu``; LZ_GPU_SCALE multiplies the number of
calls, LZ_GPU_KERNELS names the beginnings of the ids to look at, LZ_GPU_KIND one kind of attention. LZ_GPU_SHARE=2/8 takes
the third of eight shares of the calls: where kernels are compiled for each, processes side by side are sooner done.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gpu_references
import layerzero as lz
import pytest
import torch
import torch_references
from gpu_cases import Call, Draw, Want, wide
from gpu_check import FAMILIES, TOLERANCE, WANTED, Held, looked_at, results, taking, wanted
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SCALE = float(os.environ.get("LZ_GPU_SCALE", "1"))
SHARE, SHARES = map(int, os.environ.get("LZ_GPU_SHARE", "0/1").split("/"))


@pytest.fixture(scope="module")
def reached(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """The kernels that were run in this module. When all its tests have passed, no kernel of this machine was left out."""
    found: set[str] = set()
    failed = request.session.testsfailed
    yield found
    part = request.config.option.keyword or any("::" in argument for argument in request.config.args)
    if part or request.session.testsfailed > failed or SHARES > 1:
        return
    for beginning in WANTED:
        assert any(kernel.startswith(beginning) for kernel in found), f"no call reached a kernel of {beginning}"
    if not WANTED and SCALE >= 1.0:
        here = {k.kernel_id for k in lz.list_kernels() if k.available and "cuda" in k.platforms}
        assert not here - found, f"no call reached {sorted(here - found)}"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What failed in one test is not held against the kernels of the next."""
    yield
    lz.forget_failures()


def drawn(family: str, number: int, ways: bool = False) -> Call:
    """A call of a family; the same number gives the same call."""
    seed = zlib.crc32(f"{family} {number} {ways}".encode())
    return FAMILIES[family][0](Draw(seed, "cuda", ways))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_kernel_is_right(family: str, reached: set[str]) -> None:
    held = Held()
    for number in range(SHARE, int(FAMILIES[family][1] * SCALE), SHARES):
        if looked_at(call := drawn(family, number)):
            held.check(call)
    reached.update(held.reached)
    assert not held.problems, held.report()
    assert held.reached or WANTED


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("sampling", "quantizing", "caches")])
def test_tensors_may_lie_in_memory_in_any_way(family: str, reached: set[str]) -> None:
    held = Held()
    for number in range(SHARE, int(FAMILIES[family][1] * SCALE / 5), SHARES):
        if looked_at(call := drawn(family, number, ways=True)):
            held.check(call)
    reached.update(held.reached)
    assert not held.problems, held.report()


def capturable(call: Call) -> list[str]:
    """The kernels that take a call while a graph is captured."""
    before = set(taking(call))
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        torch.zeros(1, device="cuda")
        inside = taking(call)
    return [name for name in inside if name in before]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_kernels_can_be_captured(family: str) -> None:
    """A graph captured on a side stream gives what the kernel gives, also for other numbers than it was captured with."""
    held, times = Held(), Counter[str]()
    for number in range(80):
        call = drawn(family, number)
        if not looked_at(call) or all(times[name] >= 2 for name in taking(call)):
            continue
        for name in capturable(call):
            if times[name] < 2:
                times[name] += 1
                _capture(held, name, call)
    assert not held.problems, held.report()
    assert times or WANTED


#: Arguments whose numbers may be any.
DATA = {"query", "key", "value", "input", "gate", "up", "residual", "logits", "q_nope", "ckv", "key_cache", "weight"}


def _capture(held: Held, name: str, call: Call) -> None:
    kwargs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.kwargs.items()}
    starts = {k: kwargs[k].clone() for k in call.updated}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def run() -> list[Tensor]:
        for key, start in starts.items():
            kwargs[key].copy_(start)
        return results(call, lambda **kw: lz.run_kernel(name, **kw), kwargs)

    def captured() -> list[Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            outputs.extend(run())
        for tensor in outputs:
            (tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)).zero_()
        graph.replay()
        return outputs

    outputs: list[Tensor] = []
    known = len(held.problems)
    held.hold(f"{name} captured", call, captured, wanted(call))
    if len(held.problems) > known or call.updated:
        return
    for key, value in kwargs.items():
        if key in DATA and isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1:
            value.mul_(-0.5)
    want = [Want(one.clone(), exact=not one.is_floating_point()) for one in run()]

    def replayed() -> list[Tensor]:
        graph.replay()
        return outputs

    held.hold(f"{name} replayed with other numbers", call, replayed, want)


#: What is differentiated by: gradients of these are wanted.
LEAVES = {
    "query",
    "key",
    "value",
    "input",
    "gate",
    "up",
    "residual",
    "weight",
    "bias",
    "up_weight",
    "down_weight",
    "slopes",
}


def _reference(call: Call, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    if call.function in ("attention", "cross_attention"):
        values: Tensor = getattr(gpu_references, call.function)(**kwargs)[0]
        return (values,)
    with torch.device("cuda"):
        got = getattr(torch_references, call.function)(**kwargs)
    return got if isinstance(got, tuple) else (got,)


def _gradients(outputs: list[Tensor] | tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for output in outputs:
        total = total + (output.double() * torch.randn(output.shape, generator=generator, device="cuda")).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("family", ["attention", "norms", "activations", "products", "positions"])
def test_gradients_are_right(family: str, reached: set[str]) -> None:
    held = Held()
    for number in range(int(60 * SCALE)):
        call = drawn(family, number)
        if call.function == "embedding" or call.kwargs.get("alibi_slopes") is not None:
            continue
        given = {k: v.clone().requires_grad_() if k in LEAVES else v for k, v in call.kwargs.items()}
        exact = {k: v.detach().requires_grad_() if k in LEAVES else v for k, v in wide(given).items()}
        names = [k for k in given if k in LEAVES]
        expected = _gradients(_reference(call, exact), [exact[k] for k in names])
        # What was rounded to the narrowest of them is summed up in all.
        tolerance = max(TOLERANCE[given[k].dtype] for k in names)
        want = [Want(g, _slack(given[k], g, tolerance)) for k, g in zip(names, expected, strict=True)]
        training = Call(call.function, given)
        for name in taking(training):
            held.reached[name] += 1

            def run(name: str = name, given: dict[str, Any] = given, training: Call = training) -> list[Tensor]:
                outputs = results(training, lambda **kw: lz.run_kernel(name, **kw), given)
                return _gradients(outputs, [given[k] for k in names])  # noqa: B023 - called at once

            held.hold(name, training, run, want)
    reached.update(held.reached)
    assert not held.problems, held.report()
    assert held.reached or WANTED


def _slack(leaf: Tensor, gradient: Tensor, tolerance: float) -> float:
    """Ten times the tolerance of the largest gradient, in units of roundoff."""
    unit = 2.0**-53 if leaf.dtype == torch.float64 else 2.0**-24
    return 10.0 * tolerance * max(1.0, float(gradient.abs().max())) / unit
