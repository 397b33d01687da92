"""The GPU table: its calls are valid, and its figures follow from what tuning reports."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layerzero import _native

FOLDER = Path(__file__).parents[2] / "bench" / "gpu"
NAMES = ("workload", "serving", "table", "run", "variants", "llama")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The scripts of the folder as modules; they import one another by name."""
    sys.path.insert(0, str(FOLDER))
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def size(call: dict[str, Any]) -> int:
    return sum(BYTES[t["dtype"]] * math.prod(t["shape"]) for t in call["tensors"].values())


def test_every_call_is_valid(gpu: SimpleNamespace) -> None:
    for row in gpu.workload.rows() + gpu.workload.held_out():
        needs = _native.call_inputs(json.dumps(row.call), 0)
        assert needs["op"].startswith(row.call["op"].removesuffix(".causal").removesuffix(".full")), row
        assert row.dtype in ("bfloat16", "float16", "float32") and row.shape, row


def test_the_rows_are_enough_and_fit(gpu: SimpleNamespace) -> None:
    rows, held_out = gpu.workload.rows(), gpu.workload.held_out()
    assert sum(len(row.modes) for row in rows) >= 90
    assert len(held_out) >= 25
    calls = [json.dumps(row.call, sort_keys=True) for row in rows + held_out]
    assert len(set(calls)) == len(calls), "a call is there twice"
    assert {row.family for row in held_out} <= set(gpu.workload.families())
    promised = {family for promise in gpu.table.PROMISES.values() for family in promise.families}
    assert promised <= set(gpu.workload.families())
    for promise in gpu.table.PROMISES.values():
        of = [row for row in rows if promise.holds_for({"mode": "eager", **vars(row)}, None)]
        assert of and all(row.family in promise.families and row.shape.startswith(promise.shapes) for row in of)
    halves = gpu.table.PROMISES["silu_mul, halves of 4096 rows"]
    widths = [row.shape for row in rows if halves.holds_for({"mode": "graph", **vars(row)}, None)]
    assert widths == ["4096×14336", "4096×28672"]
    assert max(size(row.call) for row in rows + held_out) < 20e9
    for row in rows:
        without = row.family in ("topp", "topk") and "uniform" not in row.call["tensors"]
        assert row.modes == (("eager",) if without else ("eager", "graph"))


def test_prompts_are_shared_by_the_rows_that_say_so(gpu: SimpleNamespace) -> None:
    found = set()
    for row in gpu.workload.rows():
        shared = row.call.get("params", {}).get("shared_prefix", 0)
        assert (row.family == "cascade") is (shared > 0)
        if shared:
            (batch, pages), (_, page, *_) = (row.call["tensors"][n]["shape"] for n in ("block_tables", "key_cache"))
            found.add((batch, pages * page, shared))
    assert found == {(batch, context, context * 3 // 4) for batch in (16, 64) for context in (4096, 8192)}


def test_few_rows_of_each_family(gpu: SimpleNamespace) -> None:
    few = gpu.workload.quick(gpu.workload.rows())
    assert {row.family for row in few} == set(gpu.workload.families())
    assert all(sum(row.family == f for row in few) <= 2 for f in gpu.workload.families())
    turns = gpu.run.by_turns(gpu.workload.rows())
    assert len(turns) == len(gpu.workload.rows())
    assert [row.family for row in turns[: len(gpu.workload.families())]] == gpu.workload.families()


def timing(candidate: str, median: float | None, error: str | None = None) -> dict[str, Any]:
    stats = None if median is None else {"median_us": median, "spread_us": median / 50, "p95_us": median, "samples": 8}
    return {"candidate": candidate, "stats": stats, "error": error, "retired": False}


def tuned(times: dict[str, float | None], chosen: str | None, baseline: str | None = "plain") -> dict[str, Any]:
    """A made-up report of tuning one call."""
    ratio = None
    if baseline in times and chosen in times and times[baseline] and times[chosen]:
        ratio = times[baseline] / times[chosen]
    entry = {
        "op": "norm.rms",
        "label": "norm.rms",
        "mode": "eager",
        "baseline": baseline,
        "chosen": chosen,
        "runner_up": None,
        "basis": "measured",
        "times_baseline": ratio,
        "timings": [timing(name, us, None if us else "could not be captured") for name, us in times.items()],
        "out": [["broken", "differs from the right result"]],
    }
    return {"tune": {"tuned": [entry], "impossible": [], "left": [], "known": 0, "spent_s": 0.1}}


def named(family: str = "rms_norm", mode: str = "eager", shape: str = "1×4096") -> dict[str, Any]:
    return {"op": "norm.rms", "family": family, "shape": shape, "dtype": "bfloat16", "mode": mode, "call": {}}


def test_a_row_from_a_report(gpu: SimpleNamespace) -> None:
    row = gpu.table.row_of(named(), tuned({"plain": 30.0, "fast": 10.0, "none": None}, "fast"))
    assert (row["default"], row["default_us"], row["chosen"], row["chosen_us"]) == ("plain", 30.0, "fast", 10.0)
    assert row["times_default"] == pytest.approx(3.0)
    assert row["noise"] == pytest.approx(0.02)
    assert list(row["candidates"].items()) == [("fast", 10.0), ("plain", 30.0)]
    assert row["out"] == {"broken": "differs from the right result", "none": "could not be captured"}
    assert row["error"] is None
    no_default = gpu.table.row_of(named(), tuned({"fast": 10.0}, "fast", baseline=None))
    assert (no_default["times_default"], no_default["error"]) == (None, None)


def test_rows_that_failed_say_why(gpu: SimpleNamespace) -> None:
    nothing: dict[str, Any] = {"tuned": [], "impossible": [[{}, "no kernel can serve it"]], "left": []}
    for answer, why in [
        ({"error": "the process ended with -11"}, "the process ended with -11"),
        ({"tune": nothing}, "no kernel can serve it"),
        ({"tune": {**nothing, "impossible": []}}, "the budget did not suffice"),
        (tuned({"fast": 10.0}, None), "nothing that was timed is chosen"),
    ]:
        row = gpu.table.row_of(named(), answer)
        assert row["error"] == why
        assert gpu.table.family_table("rms_norm", [row]).count(why) == 1


def rows_of(gpu: SimpleNamespace) -> list[dict[str, Any]]:
    of = gpu.table.row_of
    return [
        of(named("rms_norm", "eager"), tuned({"plain": 20.0, "fast": 10.0}, "fast")),
        of(named("rms_norm", "graph"), tuned({"plain": 16.0, "fast": 2.0}, "fast")),
        of(named("prefill", "eager"), tuned({"plain": 10.0, "fast": 9.0}, "plain")),
        of(named("prefill", "graph"), {"error": "lost"}),
    ]


def test_the_summary_is_of_the_rows(gpu: SimpleNamespace) -> None:
    summary = gpu.table.summary(rows_of(gpu))
    assert summary["rms_norm"]["geomean_times_default"] == pytest.approx(4.0)
    assert (summary["rms_norm"]["least"], summary["rms_norm"]["rows"]) == (pytest.approx(2.0), 2)
    assert (summary["prefill"]["rows"], summary["prefill"]["failed"]) == (1, 1)
    assert summary["all"]["geomean_times_default"] == pytest.approx(16 ** (1 / 3))
    assert summary["all"]["times_where_other"] == pytest.approx(4.0)
    assert summary["all graph"]["geomean_times_default"] == pytest.approx(8.0)
    assert gpu.table.in_sample(rows_of(gpu)) == pytest.approx((10 / 9) ** (1 / 3))
    assert gpu.table.summary([])["all"]["geomean_times_default"] is None


def regret_answer(over_best: float) -> dict[str, Any]:
    row = {"chosen": "fast", "basis": "predicted", "chosen_us": over_best, "best": "best", "best_us": 1.0}
    row |= {"over_best": over_best, "times_baseline": 2.0, "noise": 0.01, "call": {}, "label": "", "baseline": "plain"}
    return {"regret": {"rows": [row], "impossible": []}}


def test_regret_and_targets(gpu: SimpleNamespace) -> None:
    answers = [(named(), regret_answer(1.0)), (named(), regret_answer(1.21)), (named(), {"error": "lost"})]
    regret = gpu.table.regret_of(answers)
    assert (regret["geomean"], regret["worst"]) == (pytest.approx(1.1), 1.21)
    assert regret["failed"][0]["error"] == "lost"
    result = {
        "rows": rows_of(gpu),
        "regret": {"held_out": regret, "tuned": gpu.table.regret_of(answers[:1])},
        "overhead": {"rms_norm": {"overhead_us": 0.4}, "attention": {"error": "no"}},
    }
    met = {one["name"]: one["met"] for one in gpu.table.targets(result)}
    assert met["× baseline, all rows"] is True
    assert met["dense attention, eager"] is False
    assert met["dense attention, graph"] is None
    assert met["norms"] is True
    assert met["least × baseline"] is True
    assert met["÷ best, tuned calls"] is True
    assert (met["÷ best, held-out calls"], met["÷ best, held-out, worst"]) == (False, True)
    assert (met["overhead of rms_norm, µs"], met["overhead of attention, µs"]) == (True, None)


def test_the_end_of_the_output_is_short(gpu: SimpleNamespace) -> None:
    rows = [gpu.table.row_of(named(f), {"error": "x" * 999}) for f in gpu.workload.families() for _ in range(20)]
    for result in ({"rows": rows + rows_of(gpu)}, {"rows": []}):
        text = gpu.table.short(result)
        assert len(text.splitlines()) <= 60
        assert max(map(len, text.splitlines())) <= 200


CHILD = """
import json, os, sys, time
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "die":
        os._exit(7)
    if do == "hang":
        time.sleep(60)
    print(json.dumps({"did": do, **({"lost": "the device"} if do == "lose" else {})}), flush=True)
"""


def test_a_process_that_is_lost_costs_one_answer(gpu: SimpleNamespace) -> None:
    server = gpu.serving.Server("unused", "cpu")
    server._command = [sys.executable, "-c", CHILD]
    try:
        assert server.ask({"do": "a"}, 20)["did"] == "a"
        assert server.ask({"do": "die"}, 20)["error"] == "the process ended with 7"
        assert server.ask({"do": "b"}, 20)["did"] == "b"
        assert server.ask({"do": "hang"}, 0.2)["error"] == "no answer within 0 s"
        assert server.ask({"do": "lose"}, 20)["lost"] == "the device"
        assert server.ask({"do": "c"}, 20)["did"] == "c"
        assert server.starts == 4
    finally:
        server.stop()


class Answers:
    """Stands in for the process: every third row is lost."""

    starts = 1

    def __init__(self, *_: str) -> None:
        self.asked = 0

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.asked += 1
        if question["do"] == "environment":
            return {"environment": {"gpu": "NVIDIA H200", "backends": {"torch": "2"}}, "took_s": 0.0}
        if question["do"] == "overhead":
            raise ValueError("a part that fails")
        if self.asked % 3 == 0:
            return {"error": "lost", "took_s": 0.0}
        answer = regret_answer(1.0) if question["do"] == "regret" else tuned({"plain": 20.0, "fast": 10.0}, "fast")
        return {**answer, "took_s": 0.0}

    def stop(self) -> None:
        pass


def test_a_run_goes_on_whatever_fails(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.run, "Server", Answers)
    monkeypatch.setattr(gpu.run.Table, "report", lambda self: None)
    assert gpu.run.main(["--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "h200.json").read_text())
    assert len(result["rows"]) == sum(len(row.modes) for row in gpu.workload.rows())
    assert 0 < result["summary"]["all"]["failed"] < len(result["rows"])
    assert result["summary"]["all"]["geomean_times_default"] == pytest.approx(2.0)
    assert result["failures"] == {"overhead": "ValueError: a part that fails"}
    assert result["regret"]["tuned"]["geomean"] == 1.0 == result["regret"]["held_out"]["geomean"]
    assert [row["family"] for row in result["rows"]] == sorted(
        (row["family"] for row in result["rows"]), key=gpu.workload.families().index
    )
    assert "MISSED" in capsys.readouterr().out


def test_no_time_left_is_said(gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.run, "Server", Answers)
    monkeypatch.setattr(gpu.run.Table, "report", lambda self: None)
    gpu.run.main(["--out", str(tmp_path), "--budget", "0.000001", "--families", "rope"])
    result = json.loads((tmp_path / "h200.json").read_text())
    assert {row["error"] for row in result["rows"][1:]} == {"no time left"}


def test_attention_as_transformers_calls_it(gpu: SimpleNamespace) -> None:
    torch.manual_seed(0)
    module = SimpleNamespace(is_causal=True)
    q, k, v = torch.randn(2, 4, 16, 32), torch.randn(2, 2, 16, 32), torch.randn(2, 2, 16, 32)
    plain = torch.nn.functional.scaled_dot_product_attention
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril() & (torch.arange(16) > 2)
    mask |= torch.eye(16, dtype=torch.bool)
    for query, given, causal in [(q, None, True), (q[:, :, -1:], None, False), (q, mask, False)]:
        out, weights = gpu.variants.attend(module, query, k, v, given, dropout=0.0, scaling=0.2)
        right = plain(query, k, v, given, is_causal=causal, scale=0.2, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
        assert weights is None


def test_llama_parts(gpu: SimpleNamespace) -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    same = gpu.llama.agreement(a, a + torch.tensor([[0.0, 0.0], [0.0, 4.0]]))
    assert (same["max_abs"], same["same_argmax"]) == (4.0, 0.5)
    times = gpu.llama.Clock("cpu").rounds({"a": lambda: None, "b": lambda: sum(range(20000))}, 5)
    assert times["a"] < times["b"]
    with pytest.raises(TimeoutError), gpu.llama.within(0.05):
        while True:
            pass
