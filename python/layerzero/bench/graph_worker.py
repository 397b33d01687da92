"""One peer of ``layerzero bench graph``, in a process of its own.

It reads commands from stdin, one in each line, and answers each with a line of JSON on stdout:

- ``prepare CASE``: makes and compiles the model, and runs it for 0.2 s. The answer has the seconds and the memory that making,
  compiling and the first call took.
- ``result FILE``: saves the model's result.
- ``time SECONDS``: the answer has the time of each call in microseconds.

An answer may have an ``error`` instead. ``graph.py`` lets only one worker run at a time, because thread pools that spin slow each
other down.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.bench import decode_steps, graph_models
from layerzero.errors import named_line

#: One call of a model with the inputs of its case.
Run = Callable[[], Tensor]


def eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """Eager torch."""
    return lambda: model(*inputs)


def compiled(model: nn.Module, inputs: tuple[Tensor, ...], mode: str | None = None) -> Run:
    """``torch.compile`` with weights frozen."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    made = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    return lambda: made(*inputs)


def tuned(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """``torch.compile(mode="max-autotune")`` with weights frozen."""
    return compiled(model, inputs, "max-autotune")


def onnxruntime(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """ONNX Runtime, with the model that torch.onnx exports."""
    import onnxruntime as ort

    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, inputs, path, dynamo=True, external_data=True, verbose=False)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {hole.name: given.numpy() for hole, given in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """OpenVINO in float32, with the model that torch.export exports."""
    import openvino as ov

    program = torch.export.export(model, inputs)
    converted = ov.convert_model(program, example_input=inputs)
    how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    made = ov.Core().compile_model(converted, "CPU", {**how, "PERFORMANCE_HINT": "LATENCY"})
    request = made.create_infer_request()
    for index, given in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(given.numpy(), shared_memory=True))

    def run() -> Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor().data)

    return run


def layerzero(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Run:
    """``lz.compile``. For a decode step, the graph that `generate` runs."""
    import layerzero as lz

    if isinstance(model, decode_steps.DecodeStep):
        return decode_steps.layerzero_step(model, *inputs, **options)
    made = lz.compile(model, *inputs, **options)
    return lambda: made(*inputs)


def layerzero_tuned(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """``lz.compile`` with the kernel of each node timed in its place."""
    return layerzero(model, inputs, tune=True)


#: All peers by name. `graph.divisor` says which of them the others are compared with.
PEERS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Run]] = {
    "eager": eager,
    "torch.compile": compiled,
    "max-autotune": tuned,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "layerzero": layerzero,
    "layerzero tuned": layerzero_tuned,
    "layerzero high": partial(layerzero, precision="high"),
    "layerzero bfloat16": partial(layerzero, weights="bfloat16"),
    "layerzero int8": partial(layerzero, weights="int8"),
    "layerzero int4": partial(layerzero, weights="int4"),
}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _timed(run: Run, seconds: float) -> list[float]:
    """Microseconds of each call: as many calls as fit into the time, and at least ten."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def main(peer: str, threads: int) -> None:
    """Runs the commands from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Compilers print; their lines are not answers.
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    cases = {case.name: case for case in graph_models.CASES}
    run: Run | None = None
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        answer: dict[str, Any] = {}
        try:
            with torch.no_grad():
                if command == "prepare":
                    run = None
                    torch.compiler.reset()
                    model, inputs = graph_models.made(cases[rest])
                    before, begin = _peak(), time.perf_counter()
                    run = PEERS[peer](model, inputs)
                    run()
                    answer = {"seconds": time.perf_counter() - begin, "peak_bytes": _peak() - before}
                    _timed(run, 0.2)
                elif run is None:
                    answer = {"error": "nothing is prepared"}
                elif command == "result":
                    torch.save(run().clone(), rest)
                else:
                    answer = {"times_us": _timed(run, float(rest))}
        except Exception as error:  # noqa: BLE001 - the row says what was wrong
            answer = {"error": named_line(error)[:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
