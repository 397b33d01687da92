"""Kernels that are compiled on first use: calls never wait for a compiler, and what is compiled serves."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero import _native, kernel_runs
from layerzero.warm_up import WarmupReport, manifest, save_manifest, warmup
from processes import forked, python
from torch import Tensor

#: Whoever waits longer than this has not been woken.
SOON = 60.0


class Compiler:
    """A kernel of ``norm.rms`` whose first call for a size waits until it is told to go on."""

    def __init__(self, kernel_id: str = "slow.rms", priority: int = 99) -> None:
        self.kernel_id = kernel_id
        #: The sizes it was compiled for, with the thread that waited.
        self.compiled: list[tuple[int, str]] = []
        self.calls = 0
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.error: Exception | None = None
        lz.register_kernel(
            operation="norm.rms",
            kernel_id=kernel_id,
            platform="cpu",
            supported_dtypes=["float32"],
            priority=priority,
            jit=True,
        )(self._kernel())

    def _kernel(self) -> Any:
        def kernel(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
            self.calls += 1
            size = input.shape[-1]
            if all(size != known for known, _ in self.compiled):
                self.begun.release()
                assert self.go_on.wait(SOON)
                if self.error is not None:
                    raise self.error
                self.compiled.append((size, threading.current_thread().name))
            return F.rms_norm(input, (size,), weight, eps)

        return kernel

    def serves(self, size: int) -> bool:
        return lz.which("rms_norm", torch.ones(2, size)).kernel_id == self.kernel_id


def settle() -> None:
    """Returns when everything that was queued is over."""
    deadline = time.monotonic() + SOON
    while True:
        # One thread does both, so that this waits for what is under way.
        assert warmup(calls=[], timeout=SOON).wait(0)
        told = jit()
        if not told["queued"] and not told["running"]:
            return
        assert time.monotonic() < deadline, told


def jit() -> dict[str, Any]:
    told: dict[str, Any] = lz.health().to_dict()["jit"]
    return told


@pytest.fixture
def slow() -> Iterator[Compiler]:
    compiler = Compiler()
    try:
        yield compiler
    finally:
        compiler.go_on.set()
        lz.unregister_kernel(compiler.kernel_id)
        lz.reset()
        settle()


def rms(rows: int, size: int) -> dict[str, Any]:
    """A call, written down."""
    return {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [rows, size]}}}


def run(size: int, rows: int = 2) -> None:
    """A call, whose result is right whoever serves it."""
    x = torch.randn(rows, size)
    torch.testing.assert_close(lz.rms_norm(x), F.rms_norm(x, (size,), None, 1e-6))


def test_calls_never_wait_while_another_kernel_can_serve(slow: Compiler) -> None:
    for _ in range(3):
        run(8)
    assert slow.begun.acquire(timeout=SOON), "nothing was compiled"
    # It is being compiled, and calls go on.
    for rows in range(1, 5):
        run(8, rows)
    assert not slow.serves(8) and slow.calls == 1
    told = jit()
    assert (told["running"], told["queued"]) == (1, 0)
    slow.go_on.set()
    settle()
    assert slow.compiled == [(8, "layerzero-compile")], "once, and not in the thread of a call"
    assert slow.serves(8) and not slow.serves(16)
    before = slow.calls
    for rows in range(1, 5):
        run(8, rows)
    assert slow.calls == before + 4
    assert jit()["failed"] == []


def test_what_a_full_queue_drops_is_the_oldest(slow: Compiler) -> None:
    lz.configure(jit={"queue_size": 2})
    dropped = jit()["dropped"]
    run(8)
    assert slow.begun.acquire(timeout=SOON)
    for size in (16, 24, 32, 40):
        run(size)
    assert jit()["dropped"] - dropped == 2
    slow.go_on.set()
    settle()
    assert [size for size, _ in slow.compiled] == [8, 32, 40]
    # What was dropped gets its turn when it is called again.
    run(16)
    settle()
    assert slow.serves(16)


def test_a_kernel_that_cannot_be_compiled_disturbs_nobody(slow: Compiler) -> None:
    slow.error = RuntimeError("ptxas died\nof something long")
    slow.go_on.set()
    next_best = Compiler("next.rms", priority=98)
    next_best.go_on.set()
    try:
        run(8)
        settle()
        [failed] = jit()["failed"]
        assert (failed["kernel"], failed["attempts"]) == ("slow.rms", 3)
        assert failed["error"] == "RuntimeError: ptxas died"
        assert slow.calls == 3, "tried twice more, and never again"
        assert [size for size, _ in next_best.compiled] == [8] and next_best.serves(8)
        run(8)
        assert slow.calls == 3
        health = lz.health()
        assert health.well and health.kernels.get("slow.rms", {}).get("failures", 0) == 0
        assert "slow.rms could not be compiled" in str(health)
        [check] = [check for check in lz.readiness_check().checks if check.name == "jit"]
        assert check.status == "warn" and "ptxas died" in check.detail
    finally:
        lz.unregister_kernel("next.rms")


def test_calls_nobody_else_can_serve(slow: Compiler) -> None:
    lz.force_kernel("norm.rms", "slow.rms")
    with pytest.raises(lz.NoKernelFoundError) as error:
        run(8)
    assert [reason.code for reason in error.value.failures["slow.rms"]] == ["JIT_DISABLED"]
    slow.go_on.set()
    settle()
    run(8)
    assert slow.compiled == [(8, "layerzero-compile")]
    lz.configure(jit={"fail_on_no_fallback": False})
    slow.go_on.set()
    run(16)
    assert (16, threading.current_thread().name) in slow.compiled, "the call waited"


def test_the_background_can_be_turned_off(slow: Compiler) -> None:
    slow.go_on.set()
    lz.configure(jit={"background_compile": False})
    run(8)
    settle()
    assert slow.calls == 0 and jit()["cold"] >= 1
    [check] = [check for check in lz.readiness_check().checks if check.name == "jit"]
    assert check.status == "warn" and "lz.warmup" in check.hint
    report = warmup(calls=[rms(2, 8)], device="cpu", timeout=SOON)
    assert report.ok and slow.serves(8)


def test_a_warm_up_compiles_and_says_so(slow: Compiler) -> None:
    slow.go_on.set()
    report = warmup(calls=[rms(4, 8), rms(9, 8), json.dumps(rms(4, 16))], device="cpu", timeout=SOON)
    assert [(c.kernel, c.device) for c in report.compiled] == [("slow.rms", "cpu")] * 2
    assert [size for size, _ in slow.compiled] == [8, 16]
    assert [c.kernel for c in report.already_warm] == ["slow.rms"], "the same but for its rows"
    assert report.ok and report.pending == [] and report.seconds > 0
    assert all(c.ms >= 0 for c in report.compiled)
    assert "2 compiled, 1 ready before, 0 failed, 0 pending" in str(report)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] and len(data["compiled"]) == 2
    calls = slow.calls
    run(8, 4)
    assert slow.calls == calls + 1, "the first call in earnest is served by it"
    again = warmup(calls=[rms(4, 8)], device="cpu", timeout=SOON)
    assert again.compiled == [] and len(again.already_warm) == 1


def test_attention_by_its_shape() -> None:
    shapes = [(1, 32, 4, 16), (1, 64, 4, 16)]
    report = warmup(operation="attention.causal", shapes=shapes, dtype=torch.float32, device="cpu", timeout=SOON)
    assert report.ok, report
    [first, _] = report.already_warm
    assert first.call["tensors"]["query"]["shape"] == [1, 32, 4, 16]
    assert first.kernel in {kernel.kernel_id for kernel in lz.list_kernels("attention")}


def test_decisions_are_remembered(slow: Compiler) -> None:
    slow.go_on.set()
    warmup(calls=[rms(3, 72)], device="cpu", timeout=SOON)
    before = lz._native.status()["cache_misses"]
    run(72, 3)
    assert lz._native.status()["cache_misses"] == before


def test_waiting_has_an_end(slow: Compiler) -> None:
    report = warmup("norm.rms", shapes=[(2, 8), (2, 16)], dtype="float32", device="cpu", timeout=0.01)
    assert len(report.pending) == 2 and not report.ok and not report.wait(0)
    slow.go_on.set()
    assert report.wait(SOON) and report.ok and len(report.compiled) == 2
    later = warmup("norm.rms", shapes=[(2, 24)], dtype="float32", device="cpu", block=False)
    assert isinstance(later, WarmupReport) and later.wait(SOON) and later.ok


def test_a_warm_up_with_mistakes_in_it(slow: Compiler) -> None:
    slow.go_on.set()
    slow.error = ValueError("no")
    tensor = {"dtype": "float32", "shape": [2, 8]}
    calls = [
        {"op": "norm.rmz", "tensors": {"input": tensor}},
        {"op": "norm.rms", "tensors": {}},
        {"op": "norm.rms", "tensors": {"input": tensor}},
        {"call": {"op": "norm.rms", "tensors": {"input": tensor}}, "device": "cuda:77"},
        {"nonsense": 1},
    ]
    report = warmup(calls=calls, device="cpu", timeout=SOON)
    assert report.pending == [] and not report.ok
    said = [(f.kernel, f.error) for f in report.failed]
    assert said[2] == ("slow.rms", "ValueError: no") and slow.calls == 3
    for at, words in ((0, "norm.rmz"), (1, "input"), (3, "cuda:77"), (4, "is no call")):
        assert said[at][0] is None and words in said[at][1], said[at]
    assert "failed slow.rms: ValueError: no" in str(report)


def test_nothing_and_nonsense_are_refused() -> None:
    for arguments in ({}, {"shapes": [(1, 2)]}):
        with pytest.raises(lz.InvalidCallError) as error:
            warmup(**arguments)  # type: ignore[arg-type]
        assert error.value.code == "NOTHING_TO_WARM_UP" and error.value.hint
    for nonsense in (3, "not json", "[1]"):
        with pytest.raises(lz.InvalidCallError, match="is no call"):
            warmup(calls=[nonsense])
    with pytest.raises(lz.LayerZeroError):
        warmup("no_such_thing", shapes=[(1, 2)])


def test_a_model_is_warmed_up_by_its_calls(slow: Compiler) -> None:
    slow.go_on.set()

    class Model(torch.nn.Module):
        example_inputs = (torch.ones(2, 48),)

        def forward(self, x: Tensor) -> Tensor:
            return lz.rms_norm(lz.rms_norm(x))

    with torch.no_grad():
        report = warmup(model=Model(), timeout=SOON)
    assert report.ok and [size for size, _ in slow.compiled] == [48]


class Config:
    def __init__(self, width: int) -> None:
        self.config = {"width": width}


def test_the_calls_of_one_process_warm_up_the_next(slow: Compiler, tmp_path: Path) -> None:
    slow.go_on.set()
    for _ in range(3):
        run(56, 5)
    mine = [e for e in manifest() if e.call.get("tensors", {}).get("input", {}).get("shape") == [5, 56]]
    assert [(e.call["op"], e.device) for e in mine] == [("norm.rms", "cpu")] and mine[0].count >= 1
    path = save_manifest(tmp_path / "calls.json", model=Config(1))
    assert path == tmp_path / "calls.json" and path.stat().st_mode & 0o777 == 0o600
    lz.unregister_kernel("slow.rms")
    settle()
    fresh = Compiler()
    fresh.go_on.set()
    report = warmup(manifest=path, model=Config(1), timeout=SOON)
    assert fresh.serves(56) and len(report.already_warm) + len(report.compiled) >= 1
    # Of another model nothing is known, and that is said.
    other = warmup(manifest=path, model=Config(2), timeout=SOON)
    assert other.ok and other.already_warm == [] and "no calls of this model" in other.notes[0]
    assert "no calls of this model" in str(other)
    path.write_text("not json")
    with pytest.raises(lz.ConfigurationError) as error:
        warmup(manifest=path)
    assert error.value.code == "BAD_MANIFEST" and "no manifest" in str(error.value)
    with pytest.raises(lz.ConfigurationError):
        save_manifest(path)


KERNEL = """
    import os, pathlib, threading
    import layerzero as lz, torch, torch.nn.functional as F
    from layerzero.warm_up import warmup
    go_on, begun, calls = threading.Event(), threading.Event(), []
    @lz.register_kernel(operation="norm.rms", kernel_id="slow.rms", platform="cpu", supported_dtypes=["float32"],
                        priority=99, jit=True)
    def kernel(input, weight=None, eps=1e-6):
        calls.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    def serves(size): return lz.which("rms_norm", torch.ones(2, size)).kernel_id == "slow.rms"
    def settle():
        told = {"queued": 1}
        while told["queued"] or told["running"]:
            assert warmup(calls=[], timeout=60).wait(0)
            told = lz.health().to_dict()["jit"]
"""


def test_a_forked_child_compiles_by_itself() -> None:
    told = forked(
        KERNEL
        + """
    lz.rms_norm(torch.ones(2, 8))
    lz.rms_norm(torch.ones(2, 16))
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        # The parent's thread is not here; its work is.
        go_on.set()
        settle()
        lz.rms_norm(torch.ones(2, 24))
        settle()
        os._exit(0 if serves(8) and serves(16) and serves(24) else 1)
    _, status = os.waitpid(child, 0)
    assert not serves(8)
    go_on.set()
    settle()
    answer([os.waitstatus_to_exitcode(status), serves(8), serves(16), serves(24)])
    """
    )
    assert told == [0, True, True, False]


def test_a_program_ends_while_a_compiler_is_at_work() -> None:
    # Nothing interrupts a thread that waits for a lock: it is waited for.
    kernel = KERNEL.replace("assert go_on.wait(60)", "go_on.wait(3)")
    assert kernel != KERNEL
    ended = python(
        "-c",
        "import textwrap\n"
        + f"exec(textwrap.dedent({kernel!r}))\n"
        + "lz.rms_norm(torch.ones(2, 8))\nassert begun.wait(60)\nprint('over', flush=True)\n",
    )
    assert ended.returncode == 0 and ended.stdout.strip() == "over", ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


LIBRARY = """
    import os, pathlib
    import layerzero as lz, torch, torch.nn.functional as F
    from layerzero.warm_up import warmup
    cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
    compiled = []
    def kernel(input, weight=None, eps=1e-6):
        made = cache / str(input.shape[-1])
        if not made.exists():
            made.mkdir(parents=True)
            compiled.append(input.shape[-1])
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    document = {"schema_version": "1.0", "backend": "lib", "backend_version": VERSION, "platform": "cpu", "ops":
        {"norm.rms": [{"kernel_id": "lib.rms", "dtypes": ["float32"], "requires_layouts": ["contiguous"],
                       "priority": 99, "jit": True, "inputs": {"weight": {}}}]}}
    lz.register_backend(document, {"lib.rms": kernel})
    restored = lz._native.load_warm()
    def serves(size): return lz.which("rms_norm", torch.ones(2, size)).kernel_id == "lib.rms"
"""


def test_a_restart_knows_what_the_caches_on_disk_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    first = LIBRARY.replace("VERSION", "'1'")
    compile_and_tell = """
    call = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [2, 8]}}}
    report = warmup(calls=[call], device="cpu", timeout=60)
    answer([restored, compiled, len(report.compiled), serves(8), serves(16)])
    """
    tell = "\n    answer([restored, serves(8), serves(16), compiled])"
    assert forked(first + compile_and_tell) == [0, [8], 1, True, False]
    # The package has restored it when it was loaded; asking again adds nothing.
    assert forked(first + tell) == [0, True, False, []]
    assert forked(LIBRARY.replace("VERSION", "'2'") + tell) == [0, False, False, []]
    (tmp_path / "triton" / "8").rmdir()
    assert forked(first + tell) == [0, False, False, []], "the cache was cleared"
    # What leaves nothing on disk has to be compiled anew: nothing is known of it.
    assert (tmp_path / ".cache" / "layerzero" / "warm.json").stat().st_mode & 0o777 == 0o600


def test_tuning_comes_with_it_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    told = forked(
        """
    import layerzero as lz
    from layerzero.warm_up import warmup
    lz.configure(auto_tune_on_warmup=True, tune_samples=2)
    report = warmup("norm.rms", shapes=[(2, 8)], dtype="float32", device="cpu", timeout=120)
    [tuned] = report.tuned
    answer([report.ok, len(tuned.tuned), tuned.tuned[0].op])
    """
    )
    assert told == [True, 1, "norm.rms"]


def test_many_threads_and_one_compiler(slow: Compiler) -> None:
    slow.go_on.set()
    sizes = [8 * i for i in range(1, 9)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for size in sizes * 3:
                run(size)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle()
    assert not failures
    assert sorted(size for size, _ in slow.compiled) == sizes, "each once"
    assert {name for _, name in slow.compiled} == {"layerzero-compile"}
    assert all(slow.serves(size) for size in sizes)


def test_the_end_of_a_compilation_is_not_printed_wherever_it_comes_up() -> None:
    code = """
    import sys
    from layerzero import warm_up

    class Dies:
        def __init__(self, error):
            self.error = error
        def __del__(self):
            raise self.error

    warm_up._say_nothing_of_ends()
    Dies(warm_up._ProgramEnds())
    Dies(ValueError("the program's own"))
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0 and "the program's own" in done.stderr and "_ProgramEnds" not in done.stderr


@pytest.mark.parametrize(("function", "params"), [("sampling.topp", {"p": 0.9}), ("sampling.topk", {"k": 3})])
def test_what_runs_in_the_background_draws_nothing_of_the_programs(function: str, params: dict[str, Any]) -> None:
    """What follows ``torch.manual_seed`` does not depend on what is compiled meanwhile."""
    call = json.dumps(
        {"op": function, "tensors": {"logits": {"dtype": "float32", "shape": [4, 100]}}, "params": params}
    )
    before = torch.get_rng_state()
    for kernel in (kernel for kernel in kernels_of(call) if not kernel.startswith("lz_cpu.ref")):
        kernel_runs.once(kernel, call, 0)
        assert torch.equal(torch.get_rng_state(), before), kernel


def kernels_of(call: str) -> list[str]:
    """Every kernel that can serve it here."""
    report = json.loads(_native.explain_call(call, 0)[0])
    kernels = [candidate["kernel_id"] for candidate in report["candidates"] if candidate["score"] is not None]
    assert len(kernels) > 1
    return kernels
