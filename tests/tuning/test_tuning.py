"""Measuring: what is wrong is never timed, what was measured decides, and nothing of it can fail a call."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero import _native
from layerzero.tuning import inputs
from layerzero.tuning.gate import Gate
from torch import Tensor

X = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [4, 64]}}}


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[Path]:
    """A database of the test's own, and nothing learned after it."""
    path = tmp_path / "perfdb.sqlite"
    lz.configure(perfdb={"path": str(path)})
    yield path
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    _native.learn()
    lz.reset()


def registered(kernel_id: str, function: Any, **more: Any) -> None:
    lz.register_kernel(
        operation="norm.rms", kernel_id=kernel_id, platform="cpu", supported_dtypes=["float32"], version="1", **more
    )(function)


@pytest.fixture
def kernels() -> Iterator[list[str]]:
    """Kernels of this test; they go with it."""
    names: list[str] = []
    yield names
    for name in names:
        lz.unregister_kernel(name)


def right(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(input, (input.shape[-1],), weight, eps)


# --- inputs -----------------------------------------------------------------------------------


def every_call() -> list[dict[str, Any]]:
    """A small call of every operation that has tensors: sizes are given as they are asked for."""
    calls = []
    for one in (one for op in lz.ops() for one in op.ops if not one.startswith("tokenize")):
        sizes: dict[str, Any] = {"dtype": "int8"} if one == "dequantize" else {}
        for _ in range(12):
            try:
                calls += lz.workload(one, **sizes)[:1]
                break
            except lz.LayerZeroError as error:
                asked = re.search(r"needs a size for '(\w+)'", str(error))
                if asked is None:
                    raise
                sizes[asked[1]] = 64
    return calls


@pytest.mark.parametrize("call", [pytest.param(c, id=c["op"]) for c in every_call()])
def test_inputs_make_valid_calls(call: dict[str, Any]) -> None:
    made = inputs.make(json.dumps(call))
    again = inputs.make(json.dumps(call))
    for name, value in made.kwargs.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, again.kwargs[name]), "the same seed gives the same numbers"
    subject = _native.Subject(made.function, made.copied())
    subject.run(made.reference)


def test_strides_are_as_asked() -> None:
    call = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [4, 6], "strides": [12, 2]}}}
    (tensor,) = inputs.make(json.dumps(call)).kwargs.values()
    assert tensor.stride() == (12, 2) and tensor.shape == (4, 6)
    broadcast = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [4, 6], "strides": [0, 1]}}}
    (tensor,) = inputs.make(json.dumps(broadcast)).kwargs.values()
    assert tensor.stride() == (0, 1) and bool((tensor[0] == tensor[3]).all())


# --- the gate -----------------------------------------------------------------------------------


def test_what_is_wrong_is_never_timed_and_never_chosen(kernels: list[str], database: Path) -> None:
    seen: list[int] = []

    def wrong(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        seen.append(1)
        return right(input, weight, eps) * 1.01

    kernels += ["mine.wrong", "mine.right"]
    registered("mine.wrong", wrong, priority=99, dims={"hidden": {}})
    registered("mine.right", right, priority=10, dims={"hidden": {}})
    report = lz.tune(calls=[X], budget="5s")
    (tuned,) = report.tuned
    assert [kernel for kernel, _ in tuned.out] == ["mine.wrong"]
    assert "differs from the right result" in dict(tuned.out)["mine.wrong"]
    assert "mine.wrong" not in [t.candidate for t in tuned.timings]
    assert len(seen) <= 3, "it was run to be checked, not to be timed"
    # Not for this shape, and not for others of the kind; for another dtype nothing is known.
    for rows in (4, 999):
        explained = lz.explain("rms_norm", torch.ones(rows, 64))
        (out,) = [c for c in explained.candidates if c.kernel_id == "mine.wrong"]
        assert [r.code for r in out.reasons] == ["NUMERICAL_MISMATCH"]
    assert json.loads(sqlite_text(database, "mine.wrong"))["outcome"] == "wrong"


def sqlite_text(database: Path, kernel: str) -> str:
    with sqlite3.connect(database) as connection:
        connection.row_factory = sqlite3.Row
        row = connection.execute("SELECT * FROM perf_records WHERE kernel_id = ?", [kernel]).fetchone()
    return json.dumps({key: row[key] for key in dict(row) if not isinstance(row[key], bytes)})


def test_what_fails_is_kept_as_that(kernels: list[str], database: Path) -> None:
    def failing(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        raise RuntimeError("no such luck\nin detail")

    kernels.append("mine.failing")
    registered("mine.failing", failing, priority=99, dims={"hidden": {}})
    report = lz.tune(calls=[X], budget="5s")
    assert dict(report.tuned[0].out)["mine.failing"] == "RuntimeError: no such luck"
    row = json.loads(sqlite_text(database, "mine.failing"))
    assert row["outcome"] == "failed" and "no such luck" in row["error"]
    assert lz.which("rms_norm", torch.ones(4, 64)).kernel_id != "mine.failing"


def test_the_gate_knows_right_from_wrong_in_place_and_when_drawing() -> None:
    (call,) = lz.workload("fused_add_rms_norm", dtype="float32", shapes=[(3, 32)])
    made = inputs.make(json.dumps(call))
    assert Gate(made).judge("torch.add_rms_norm")[1] is None
    before = {k: v.clone() for k, v in made.kwargs.items() if isinstance(v, Tensor)}
    Gate(made).judge("torch.add_rms_norm")
    assert all(torch.equal(made.kwargs[k], v) for k, v in before.items()), "the inputs are not used up"
    for op in ("sample_topk", "sample_topp"):
        call = lz.workload(op, dtype="float32", shapes=[(2, 100)])[0]
        made = inputs.make(json.dumps(call))
        for kernel in (
            ("torch.topk", "torch.topk.literal") if op == "sample_topk" else ("torch.topp.sorted", "torch.topp.literal")
        ):
            assert Gate(made).judge(kernel)[1] is None

    def last(logits: Tensor, k: int, seed: int = 0) -> Tensor:
        return logits.argmin(-1)

    lz.register_kernel(
        operation="sampling.topk",
        kernel_id="mine.last",
        platform="cpu",
        supported_dtypes=["float32"],
        dims={"vocab": {}},
    )(last)
    try:
        call = lz.workload("sample_topk", dtype="float32", shapes=[(2, 100)])[0]
        assert Gate(inputs.make(json.dumps(call))).judge("mine.last")[1] == "drew a token that may not be drawn"
    finally:
        lz.unregister_kernel("mine.last")


def test_large_calls_are_judged_in_float64(kernels: list[str]) -> None:
    def wrong(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        out = right(input, weight, eps)
        out[-1, -1] += 1.0
        return out

    kernels.append("mine.wrong")
    registered("mine.wrong", wrong, dims={"hidden": {}})
    call = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [9000, 1024]}}}
    made = inputs.make(json.dumps(call))
    assert made.flops > 3e7
    assert Gate(made).judge("torch.rms_norm")[1] is None
    assert Gate(made).judge("mine.wrong")[1] is not None


# --- measuring ----------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_remembered_by_other_processes(kernels: list[str], database: Path) -> None:
    """Waiting is the only thing that makes one of these slower: ten times the work, so that no noise turns it round."""

    def slow(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        for _ in range(30):
            result = right(input, weight, eps)
        return result

    kernels.append("mine.slow")
    registered("mine.slow", slow, priority=99, dims={"hidden": {}})
    x = torch.ones(4, 64)
    assert lz.which("rms_norm", x).kernel_id == "mine.slow", "nothing is measured yet: priority decides"
    report = lz.tune(calls=[X], budget="10s")
    assert report.tuned[0].chosen != "mine.slow"
    explained = lz.explain("rms_norm", x)
    assert explained.basis == "measured"
    (times,) = [c.time_us for c in explained.candidates if c.kernel_id == "mine.slow"]
    assert times is not None and explained.candidates[0].time_us is not None and times > explained.candidates[0].time_us
    assert explained.baseline == "torch.rms_norm"
    # Between measured shapes nothing is measured: one shape alone predicts nothing it could be trusted with.
    assert lz.explain("rms_norm", torch.ones(400, 64)).basis == "declared"
    script = f"""
import layerzero as lz, torch
torch.set_num_threads({torch.get_num_threads()})
lz.configure(perfdb={{"path": {str(database)!r}}})
from layerzero import _native
assert _native.learn() > 0
print([c.time_basis for c in lz.explain("rms_norm", torch.ones(4, 64)).candidates if c.time_us])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "measured" in done.stdout


def test_another_database_takes_effect_at_once(tmp_path: Path, database: Path) -> None:
    x = torch.empty(4, 64)
    lz.tune(calls=[X], budget="2s")
    assert lz.explain("rms_norm", x).basis == "measured"
    lz.configure(perfdb={"path": str(tmp_path / "another.sqlite")})
    assert lz.explain("rms_norm", x).basis == "declared"
    lz.configure(perfdb={"path": str(database)})
    assert lz.explain("rms_norm", x).basis == "measured"
    # A process that has not met a database before goes by the one it is given, too.
    code = (
        "import sys, torch, layerzero as lz; lz.doctor(); lz.configure(perfdb={'path': sys.argv[1]});"
        f"torch.set_num_threads({torch.get_num_threads()});"
        "print(lz.explain('rms_norm', torch.empty(4, 64)).basis)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(database)], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == "measured"


def test_what_was_measured_is_not_measured_again() -> None:
    first = lz.tune(calls=[X], budget="10s")
    assert len(first.tuned) == 1 and first.known == 0
    second = lz.tune(calls=[X], budget="10s")
    assert second.known == 1
    forced = lz.tune(calls=[X], budget="10s", force=True)
    assert len(forced.tuned) == 1


def test_the_calls_of_a_model_are_tuned() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return lz.silu_mul(lz.rms_norm(x), x)

    calls = lz.calls_of(Model(), torch.empty(4, 64))
    tuned = lz.tune(calls=calls, budget="10s").tuned
    assert {t.op for t in tuned} == {"norm.rms", "activation.silu_mul"} and len(calls) == 2


def test_a_call_is_made_between_before_and_after() -> None:
    said: list[str] = []

    def before() -> None:
        said.append("before")

    def after() -> float:
        said.append("after")
        return float(len(said))

    subject = _native.Subject("rms_norm", {"input": torch.ones(2, 8)})
    assert subject.time_between("torch.rms_norm", 3, before, after) == [2.0, 4.0, 6.0]
    assert said == ["before", "after"] * 3
    with pytest.raises(ZeroDivisionError):
        subject.time_between("torch.rms_norm", 2, before, lambda: 1 / 0)


def test_stopping_loses_nothing(kernels: list[str], database: Path) -> None:
    calls = [{"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [rows, 64]}}} for rows in (2, 4, 8)]
    told: list[str] = []

    def stop(progress: str) -> bool:
        told.append(progress)
        return json.loads(progress)["done"] < 1

    request = {"calls": calls}
    report = json.loads(_native.measure(json.dumps(request), 30.0, 8, False, 0, False, stop))
    assert report["interrupted"] and len(report["tuned"]) == 1 and len(report["left"]) == 2
    stopped = lz.TuneReport._from({**report, "device": "cpu"})
    assert str(stopped).splitlines()[-1] == "2 not measured: the budget was spent; tune again to go on"
    rest = lz.tune(calls=calls, budget="30s")
    assert "not measured" not in str(rest)
    # A call that is known, but not well enough, may be measured further.
    missing = [call for call in calls if call != report["tuned"][0]["call"]]
    assert rest.known == 1 and not rest.left
    assert len(missing) == 2 and all(call in [one.call for one in rest.tuned] for call in missing)


def test_an_interrupt_is_raised_and_what_was_measured_stays(kernels: list[str], database: Path) -> None:
    calls = [{"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [rows, 64]}}} for rows in (2, 4)]

    def interrupted(progress: str) -> bool:
        if json.loads(progress)["done"] == 1:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        _native.measure(json.dumps({"calls": calls}), 30.0, 8, False, 0, False, interrupted)
    assert lz.tune(calls=calls, budget="30s").known == 1


def test_regret_keeps_nothing(database: Path) -> None:
    lz.tune(calls=[X], budget="5s")
    with sqlite3.connect(database) as connection:
        before = connection.execute("SELECT count(*) FROM perf_records").fetchone()
    other = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [8, 64]}}}
    regret = lz.regret(calls=[other], budget="5s")
    (row,) = regret.rows
    assert row.over_best >= 1.0 and regret.worst == row.over_best
    assert row.chosen_us / row.best_us == pytest.approx(row.over_best)
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM perf_records").fetchone() == before


def test_calls_go_on_while_others_are_tuned() -> None:
    x = torch.randn(16, 64)
    want = lz.rms_norm(x)
    stop, wrong = threading.Event(), []

    def call() -> None:
        while not stop.is_set():
            got = lz.rms_norm(x)
            if not torch.allclose(got, want, atol=1e-5):
                wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        lz.tune("rms_norm", shapes=[(16, 64), (64, 64)], budget="5s")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_another_version_of_a_library_makes_measurements_stale(kernels: list[str], database: Path) -> None:
    kernels.append("mine.k")
    registered("mine.k", right, priority=99, dims={"hidden": {}})
    lz.tune(calls=[X], budget="5s")
    assert _native.learn() > 0
    lz.unregister_kernel("mine.k")
    lz.register_kernel(
        operation="norm.rms",
        kernel_id="mine.k",
        platform="cpu",
        supported_dtypes=["float32"],
        version="2",
        dims={"hidden": {}},
    )(right)
    _native.learn()
    (mine,) = [c for c in lz.explain("rms_norm", torch.ones(4, 64)).candidates if c.kernel_id == "mine.k"]
    assert mine.time_us is None
    with sqlite3.connect(database) as connection:
        (why,) = connection.execute("SELECT invalid_why FROM perf_records WHERE kernel_id = 'mine.k'").fetchone()
    assert "1" in why and "2" in why


# --- bad input, bad databases ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"operation": "atention"}, "atention"),
        ({}, "nothing is asked for"),
        ({"shapes": [(1, 2)]}, "no operation"),
        ({"operation": "rms_norm", "shapes": [(0,)], "budget": "0s"}, "budget"),
        ({"operation": "rms_norm", "budget": "soon"}, "budget"),
        ({"operation": "rms_norm", "budget": -1.0}, "budget"),
        ({"operation": "rms_norm", "dtype": "float33"}, "float33"),
        ({"operation": "rms_norm", "head_dim": 64}, "head_dim"),
        ({"operation": "attention.causal", "shapes": [(1, 2, 3)]}, "3"),
        ({"operation": "attention.causal", "shapes": [(1, -2, 3, 4)]}, "-2"),
        ({"model": "gpt5"}, "gpt5"),
        ({"model": '{"model_type":'}, "no JSON"),
        ({"operation": "rms_norm", "device": "tpu"}, "tpu"),
        ({"calls": [{"op": "norm.rms"}]}, "tensors"),
        ({"calls": [{"op": "norm.rms", "tensors": {"y": {"dtype": "float32", "shape": [1]}}}]}, "'y'"),
    ],
)
def test_bad_requests_say_what_is_wrong(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(lz.LayerZeroError) as raised:
        lz.tune(**arguments)
    assert says in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_of_ours_fails_nobody(database: Path, content: bytes) -> None:
    database.write_bytes(content)
    assert _native.learn() == 0
    x = torch.randn(4, 64)
    assert torch.allclose(lz.rms_norm(x), F.rms_norm(x, (64,), eps=1e-6), atol=1e-5)
    assert len(lz.tune(calls=[X], budget="5s").tuned) == 1
    assert _native.learn() > 0, "kept in memory, or in the file where it was empty"
    assert not content or database.read_bytes() == content, "somebody else's file is not touched"
    assert lz.health().perfdb["durable"] is (not content)


def test_a_place_where_nothing_can_be_kept_fails_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lz.configure(perfdb={"path": str(tmp_path / "file" / "perfdb.sqlite")})
    report = lz.tune(calls=[X], budget="5s")
    assert len(report.tuned) == 1
    assert lz.health().perfdb["durable"] is False
    assert lz.which("rms_norm", torch.ones(4, 64)).kernel_id


def test_switched_off_nothing_is_kept(database: Path) -> None:
    lz.configure(perfdb={"enabled": False, "path": str(database)})
    assert len(lz.tune(calls=[X], budget="5s").tuned) == 1
    assert not database.exists()
    assert lz.explain("rms_norm", torch.ones(4, 64)).basis == "declared"


def test_ready_counts_the_rows_of_the_database(database: Path) -> None:
    def said() -> str:
        (check,) = [check for check in lz.readiness_check().checks if check.name == "perfdb"]
        return check.detail

    assert "nothing is measured here yet" in said()
    for rows in (4, 32):
        lz.tune(
            calls=[{"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [rows, 64]}}}], budget="2s"
        )
        with sqlite3.connect(database) as connection:
            (kept,) = connection.execute("SELECT count(*) FROM perf_records WHERE outcome = 'ok'").fetchone()
        assert kept > 1 and said() == f"selection goes by {kept} measurements"


# --- threads ----------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    """As many threads after the test as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_what_was_measured_with_other_threads_does_not_rank(database: Path, kernels: list[str]) -> None:
    # One kernel is far slower with one thread, the other with more.
    ran: list[str] = []

    def threaded(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        ran.append("threads.many")
        if torch.get_num_threads() == 1:
            for _ in range(20):
                right(input, weight, eps)
        return right(input, weight, eps)

    def plain(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        ran.append("threads.one")
        if torch.get_num_threads() > 1:
            for _ in range(20):
                right(input, weight, eps)
        return right(input, weight, eps)

    for name, function in (("threads.many", threaded), ("threads.one", plain)):
        registered(name, function, trusted=True)
        kernels.append(name)
    # Small enough for torch to use one thread: its threads wait for each other for milliseconds on a busy machine.
    x = torch.randn(4, 64)

    def chosen() -> tuple[str | None, str]:
        report = lz.explain("rms_norm", x)
        served = lz.rms_norm(x)
        assert torch.allclose(served, right(x))
        return report.chosen, report.basis

    # These two kernels and no other: the reference of a call this small is faster than any of several steps.
    with lz.disabled("torch"), lz.disabled("lz_cpu"):
        torch.set_num_threads(2)
        lz.tune(calls=[X], budget="2s")
        assert chosen() == ("threads.many", "measured") and ran[-1] == "threads.many"
        torch.set_num_threads(1)
        assert chosen()[1] == "declared", "what was measured with two threads is not asked"
        lz.tune(calls=[X], budget="2s")
        assert chosen() == ("threads.one", "measured") and ran[-1] == "threads.one"
        # A call that was made before is remembered by how many threads it had.
        torch.set_num_threads(2)
        lz.rms_norm(x)
        assert ran[-1] == "threads.many"
    with sqlite3.connect(database) as rows:
        assert {n for (n,) in rows.execute("SELECT DISTINCT threads FROM perf_records")} == {1, 2}
