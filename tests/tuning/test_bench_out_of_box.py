"""`layerzero bench out-of-box`: both sides of every row are right, the rows are enough, and the figures follow from the times."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layerzero as lz
import pytest
import torch
import torch_references
from bench_rows import SMALL, Recording, is_right, may_be_drawn, reconstructs, tensors, wide
from conftest import TOLERANCE
from layerzero.bench import empty, out_of_box
from layerzero.bench.geometries import models
from layerzero.bench.model_rows import rows
from layerzero.bench.row import CPU, GPU, Row

ROWS = [row for row in rows(CPU) if row.elements <= CPU.largest]
#: What the rows have to show.
KINDS = {
    "attention",
    "window",
    "softcap",
    "paged",
    "mla",
    "mask",
    "cross_attention",
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "silu_mul",
    "gelu",
    "rope",
    "linear",
    "embedding",
    "sample_topk",
    "sample_topp",
    "quantize",
    "dequantize",
    "kv_append",
}


def check(row: Row, dtype: torch.dtype) -> None:
    """The call and the torch code against the definition in float64, which knows neither."""
    pair = row.made("cpu", dtype)
    name, args, kwargs = pair.ours(Recording())
    args, kwargs = tuple(map(wide, args)), {key: wide(value) for key, value in kwargs.items()}
    tolerance = TOLERANCE[dtype]
    if name.startswith("sample"):
        allowed = may_be_drawn(name, args[0])
        # Many draws where they are cheap: a token in ten lies outside of what top-p keeps.
        for _ in range(max(1, (1 << 20) // args[0].numel())):
            for drawn in (pair.ours(lz), pair.torch()):
                assert drawn.shape == allowed.shape[:1] and allowed.gather(-1, drawn[:, None]).all()
    elif name == "quantize":
        for values, scale in (pair.ours(lz)[:2], pair.torch()):
            reconstructs(values, scale, args[0])
    elif name == "kv_append":
        want = torch_references.kv_append(*args, **kwargs)
        for call in (lambda: pair.ours(lz), pair.torch):
            for cache in pair.updated:
                cache.zero_()
            call()
            is_right(list(pair.updated), want, 0.0)
    else:
        reference = {"embedding": lambda ids, table: table[ids]}.get(name) or getattr(torch_references, name)
        want = tensors(reference(*args, **kwargs))
        is_right(tensors(pair.ours(lz)), want, tolerance)
        is_right(tensors(pair.torch()), want, tolerance)


def held() -> list[Row]:
    """The rows that are held to float64: at full size all of them, else of each kind, phase and layout those of two models."""
    all_rows = [row for row in rows(SMALL) if row.elements <= SMALL.largest]
    if os.environ.get("LZ_TEST_SCALE") == "full":
        return all_rows
    of: dict[tuple[str, str, str], list[Row]] = {}
    for row in all_rows:
        of.setdefault((row.kind, row.phase, row.layout), []).append(row)
    return [row for alike in of.values() for row in {row.model: row for row in (alike[0], alike[-1])}.values()]


@pytest.mark.parametrize("row", held(), ids=lambda row: row.name)
def test_both_sides_give_what_the_operation_is(row: Row) -> None:
    with torch.no_grad():
        check(row, torch.float32)


@pytest.mark.parametrize("row", [row for row in rows(SMALL, ["llama-3.2-1b", "t5-base"])], ids=lambda row: row.name)
def test_both_sides_are_right_in_half_precision(row: Row) -> None:
    if row.kind in ("quantize", "embedding"):
        pytest.skip("the torch code rounds its scale" if row.kind == "quantize" else "looks rows up")
    with torch.no_grad():
        check(row, torch.bfloat16)


def test_the_rows_are_of_enough_models_and_of_every_kind() -> None:
    assert len({row.model for row in ROWS}) >= 12 and len({model.family for model in models().values()}) >= 12
    assert {row.kind for row in ROWS} == KINDS == {row.kind for row in rows(GPU)}
    dense = {(row.phase, row.layout) for row in ROWS if row.kind == "attention"}
    assert dense == {(phase, layout) for phase in ("prefill", "decode") for layout in ("BSHD", "BHSD")}
    assert {row.phase for row in ROWS if row.kind == "window"} == {"prefill", "decode"}
    for sizes in (CPU, GPU):
        names = [row.name for row in rows(sizes)]
        assert len(set(names)) == len(names)
    # Nothing is left out on a GPU, and only weights are on a CPU.
    assert all(row.elements <= GPU.largest for row in rows(GPU))
    assert {row.kind for row in rows(CPU) if row.elements > CPU.largest} <= {"linear", "embedding"}


def test_sizes_are_those_of_the_models() -> None:
    by_kind = {row.kind: row for row in rows(CPU, ["gemma-2-9b"])}

    def call(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _, args, kwargs = by_kind[kind].made("cpu", torch.float32).ours(Recording())
        return args, kwargs

    (q, k, v), kwargs = call("window")
    assert (q.shape[1], k.shape[1], v.shape[3], kwargs["window"]) == (16, 8, 256, 4095) and k.shape[2] > 4096
    assert call("softcap")[1]["softcap"] == 50.0
    assert call("gelu")[0][0].shape[-1] == 14336 and call("gelu")[0][1] == "tanh"
    assert call("sample_topp")[0][0].shape[-1] == 256000
    assert call("rms_norm")[0][1].shape == (3584,) and call("rms_norm")[0][2] == 1e-6
    # No sequence is longer than the model's positions.
    assert "1×512 " in next(row.name for row in rows(GPU, ["bert-base"]) if row.kind == "attention")


def test_a_row_makes_the_same_tensors_again() -> None:
    row = next(row for row in ROWS if row.kind == "linear")
    first, again = (row.made("cpu", torch.float32).ours(Recording())[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def timed(times: float, spread: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "times_torch": times,
        "low": times - spread,
        "high": times + spread,
        "kernels": ["a"],
        "basis": "declared",
        **more,
    }


def made_up() -> list[dict[str, Any]]:
    captured, refused = {"kernel": "a", **timed(4.0)}, {"refused": {"lz": "no"}}
    return [
        {"name": "one", "kind": "rope", "moments": {"0": timed(2.0, graph=captured), "10": timed(8.0)}},
        {"name": "two", "kind": "rope", "moments": {"0": timed(0.5, graph={"kernel": "a", **timed(0.9)})}},
        {"name": "three", "kind": "gelu", "moments": {"0": timed(0.96, 0.02, graph=refused)}},
        {"name": "four", "kind": "gelu", "moments": {"0": {"error": "no"}}},
        {
            "name": "five",
            "kind": "mask",
            "moments": {"0": timed(0.97, graph={"refused": {"lz": "no", "torch": "nor I"}})},
        },
    ]


def test_the_summary_is_that_of_the_times() -> None:
    found = out_of_box.summary(made_up(), "0")
    assert found["rows"] == 4 and found["errors"] == 1
    assert found["geomean"] == pytest.approx((2.0 * 0.5 * 0.96 * 0.97) ** 0.25)
    assert (found["least"], found["least_row"]) == (0.5, "two")
    # 0.97 itself is not below, and what reaches it in a quarter of the rounds is noise.
    assert found["below"] == ["two", "three"] and found["below_beyond_noise"] == ["two"]
    assert found["kinds"]["rope"] == {"rows": 2, "geomean": pytest.approx(1.0), "least": 0.5}
    graphs = found["graphs"]
    assert (graphs["captured"], graphs["rows"], graphs["refused"]) == (2, 2, {"lz": 2, "torch": 1})
    assert graphs["geomean"] == pytest.approx(math.sqrt(3.6)) and graphs["below"] == ["two"]
    assert graphs["reasons"] == {"lz": {"no": ["three", "five"]}, "torch": {"nor I": ["five"]}}


def test_the_summary_of_other_moments() -> None:
    later = out_of_box.summary(made_up(), "10")
    assert (later["rows"], later["geomean"], later["below"]) == (1, pytest.approx(8.0), []) and "graphs" not in later
    never = out_of_box.summary(made_up(), "60")
    assert never["rows"] == 0 and never["geomean"] is None and never["least"] is None


def test_each_row_has_a_clock_of_its_own() -> None:
    clock = [0.0]
    chosen = ROWS[:3]
    seen = []
    for row, moment, after in out_of_box.scheduled(
        chosen, [0.0, 10.0, 60.0], lambda: clock[0], lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    ):
        seen.append((chosen.index(row), moment, after))
        clock[0] += 6.0
    # The first row is due again after 10 s, which is after the first calls of two rows.
    assert seen[:4] == [(0, 0.0, 0.0), (1, 0.0, 0.0), (0, 10.0, 12.0), (1, 10.0, 12.0)]
    assert sorted((place, moment) for place, moment, _ in seen) == [(i, m) for i in range(3) for m in (0.0, 10.0, 60.0)]
    assert all(after >= moment for _, moment, after in seen)


def test_the_process_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_PREFER", "torch")
    made = empty.environment(tmp_path)
    assert "LAYERZERO_PREFER" not in made
    assert all(made[name].startswith(str(tmp_path)) for name in empty.CACHES)
    assert not [place for place in tmp_path.rglob("*") if place.is_file()]


def test_a_database_that_is_not_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "perfdb.sqlite"
    kept.touch()
    monkeypatch.setattr(lz, "settings", lambda: [lz.Setting("perfdb.path", str(kept), {})])
    request = {"device": "cpu", "models": ["gpt2"], "moments": [0.0], "dtype": "float32", "seconds": 0.01}
    with pytest.raises(RuntimeError, match="there are measurements"):
        next(out_of_box._child(request))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert out_of_box.main(["--models", "bert-base", "--seconds", "0.001", "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["problems"] == [] and result["moments_s"] == [0.0]
    assert [row["name"] for row in result["rows"]] == [row.name for row in rows(CPU, ["bert-base"])]
    for row in result["rows"]:
        one = row["moments"]["0"]
        assert min(one[name] for name in ("lz_us", "torch_us", "times_torch", "lz_first_ms", "torch_first_ms")) > 0
        # Nothing was measured here before: only what others measured, or what kernels declare, can have decided.
        assert one["kernels"] and one["basis"] in ("prior", "declared")
    assert result["summary"]["0"] == out_of_box.summary(result["rows"], "0")
    assert "at the first call: 10 rows, geometric mean" in capsys.readouterr().out


def test_a_process_that_ends_early_is_a_problem() -> None:
    result = out_of_box.measure("cpu", ["gpt2"], dtype="no_dtype")
    assert len(result["problems"]) == 1 and "ended early: status 1" in result["problems"][0]
    assert "no_dtype" in result["problems"][0] and result["summary"]["0"]["rows"] == 0


def test_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: a capture that gives the call itself, and one that is refused."""
    made = []

    def captured(call: Callable[[], Any]) -> Any:
        made.append(call)
        return SimpleNamespace(replay=call), None

    monkeypatch.setattr(out_of_box, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    pair: dict[str, Callable[[], Any]] = {"lz": lambda: None, "torch": lambda: None}
    found = out_of_box._in_graphs(pair, lambda: SimpleNamespace(chosen="a"), lambda: None, 0.01)
    assert found["kernel"] == "a" and found["times_torch"] > 0 and made == list(pair.values())

    def refused(call: Callable[[], Any]) -> Any:
        if call is pair["lz"]:
            raise lz.CudaGraphUnsafeError("not here\nwith more", code="CUDA_GRAPH_UNSAFE")
        return captured(call)

    monkeypatch.setattr(out_of_box, "captured", refused)
    found = out_of_box._in_graphs(pair, lambda: SimpleNamespace(chosen="a"), lambda: None, 0.01)
    assert list(found) == ["refused"] and list(found["refused"]) == ["lz"]
    assert found["refused"]["lz"].startswith("CudaGraphUnsafeError: ") and "\n" not in found["refused"]["lz"]


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lists = made_up()
    result = {
        "gpu": "a GPU",
        "device": "cuda",
        "dtype": "bfloat16",
        "versions": {"torch": "2"},
        "moments_s": [0.0, 10.0],
    }
    result |= {"rows": lists, "summary": {moment: out_of_box.summary(lists, moment) for moment in ("0", "10")}}
    out_of_box.show({**result, "left_out": ["large"], "problems": ["four at 0 s: no"]})
    shown = capsys.readouterr().out
    for words in (
        "a (declared)",
        "refused",
        "error",
        "2 captured, 2 refused (1 of torch's)",
        "problem: four at 0 s: no",
    ):
        assert words in shown


def test_a_model_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        out_of_box.main(["--models", "gpt-9"])
    assert "no model is called gpt-9; there are gpt2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        out_of_box.main(["--moments", "0,soon"])
