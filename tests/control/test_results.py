"""What public functions return: objects with attributes, plain data, text and a table; old names and forms warn and work."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native, deprecations
from layerzero.results import KeyedResult
from torch import nn

X = torch.ones(2, 8)
Q = torch.randn(1, 8, 4, 16)
MODEL = nn.Sequential(nn.LayerNorm(8), nn.GELU())


class Norm(nn.Module):
    """Makes one call of ours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lz.rms_norm(x)


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[None]:
    """A database of the test's own, and nothing of what it said in code is left."""
    lz.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    _native.learn()
    lz.release_pins()
    lz.reset()


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was warned of in this process."""
    monkeypatch.setattr(deprecations, "_warned", set())


def broken_table(folder: Path) -> Path:
    """A table with an entry that cannot be kept."""
    data = lz.solve(MODEL, X, shape_buckets={"batch": [2]}).to_dict()
    data["plans"][0]["ops"][0]["kernel_id"] = "no.such.kernel"
    path = folder / "table.json"
    path.write_text(json.dumps(data))
    return path


def lockfile(folder: Path) -> Path:
    """A lockfile of one call."""
    return lz.write_lockfile(folder / "layerzero.lock", calls=lz.calls_of(MODEL, X))


def manifest(_: Path) -> Any:
    lz.rms_norm(X)
    return lz.manifest()


#: An answer of every public function that gives one.
ANSWERS: dict[str, Callable[[Path], Any]] = {
    "auto_tune_status": lambda _: lz.auto_tune_status(),
    "calls_of": lambda _: lz.calls_of(MODEL, X),
    "compile_report": lambda _: lz.compile_report(),
    "decide": lambda _: lz.decide(Norm(), X),
    "doctor": lambda _: lz.doctor(file=io.StringIO()),
    "dry_run": lambda _: lz.dry_run(MODEL, X),
    "explain": lambda _: lz.explain("attention", Q, Q, Q, softcap=30.0),
    "explain_call": lambda _: lz.explain_call(lz.calls_of(MODEL, X)[0]),
    "health": lambda _: lz.health(),
    "list_kernels": lambda _: lz.list_kernels("rms_norm"),
    "load_lockfile": lambda folder: lz.load_lockfile(lockfile(folder)),
    "load_table": lambda folder: lz.load_table(broken_table(folder)),
    "manifest": manifest,
    "ops": lambda _: lz.ops(),
    "readiness_check": lambda _: lz.readiness_check(),
    "regret": lambda _: lz.regret("rms_norm", shapes=[(4, 16)], budget="500ms"),
    "settings": lambda _: lz.settings(),
    "solve": lambda _: lz.solve(MODEL, X, shape_buckets={"batch": [2]}),
    "tune": lambda _: lz.tune("rms_norm", shapes=[(4, 16)], budget="500ms"),
    "validate": lambda _: lz.validate("torch.sdpa.flash", Q, Q, Q, softcap=30.0),
    "warmup": lambda _: lz.warmup("rms_norm", shapes=[(4, 16)], dtype="float32", device="cpu"),
    "which": lambda _: lz.which("rms_norm", X),
    "workload": lambda _: lz.workload(MODEL, X),
}
#: What the others give.
NOTHING = {
    *("configure", "force_kernel", "forget_failures", "load_config", "register_backend", "register_tokenizer"),
    *("register_with_diffusers", "register_with_transformers"),
    *("release_captures", "release_pins", "reload", "reset", "restart_rollout", "unforce_kernel", "unregister_kernel"),
}
CONTEXTS = {"avoid", "deterministic", "disabled", "layout", "patched", "prefer"}
TEXT_OR_PATH = {"model_hash", "save_manifest", "write_lockfile"}
RESULTS_OF_KERNELS = {"detokenize", "page_tables", "run_kernel", "scaled_dot_product_attention", "tokenize"}
DECORATORS = {"register_kernel"}
#: What holds a model that was changed or compiled, whose report is an answer with tests of its own; and what holds a weight.
HOLDERS = {"compile", "load_plan", "optimize", "pack"}
#: Answers that fill, or that wrap a model.
LIVE = (lz.WarmupReport, lz.Recording, lz.Plan)


def test_every_public_function_is_here() -> None:
    operations = {info.function for info in lz.ops()}
    functions = {name for name in lz.__all__ if callable(thing := getattr(lz, name)) and not inspect.isclass(thing)}
    known = set(ANSWERS) | NOTHING | CONTEXTS | TEXT_OR_PATH | RESULTS_OF_KERNELS | DECORATORS | HOLDERS | operations
    assert functions == known


class Tags(HTMLParser):
    """Opens and closes every tag, and collects the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def inside(answer: Any) -> Iterator[Any]:
    """An answer, and the answers in it."""
    yield answer
    if isinstance(answer, lz.Rows):
        for row in answer[:3]:
            yield from inside(row)
    elif dataclasses.is_dataclass(answer):
        for field in dataclasses.fields(answer):
            if isinstance(value := getattr(answer, field.name), lz.Result):
                yield from inside(value)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_data_text_and_a_table(name: str, tmp_path: Path) -> None:
    answer = ANSWERS[name](tmp_path)
    for one in inside(answer):
        assert isinstance(one, (lz.Result, lz.Plan)), type(one)
        data = one.to_dict()
        assert isinstance(data, dict) and json.loads(json.dumps(data)) == data
        # A kernel of a rival may be described by any text, so that only what people see is looked at.
        assert str(one).strip() and "object at 0x" not in str(one)
        assert not isinstance(one, lz.Result) or isinstance(one, lz.Reason) or repr(one) == str(one)
        tags = Tags(one._repr_html_())
        assert "table" in tags.seen and tags.seen <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    if not isinstance(answer, LIVE):
        with pytest.raises((AttributeError, TypeError)):
            answer.anything = 1
        with pytest.raises((AttributeError, TypeError)):
            setattr(answer, next(iter(answer.to_dict())), 1)


def test_a_recording_is_an_answer() -> None:
    with lz.capture() as recorded:
        lz.rms_norm(X)
    assert recorded.to_dict()["calls"] == [recorded.calls[0].to_dict()]
    assert recorded.calls[0].call["op"] == "norm.rms" and "norm.rms on cpu" in str(recorded)
    assert "table" in Tags(recorded._repr_html_()).seen


def test_what_is_shown_is_escaped() -> None:
    hostile = lz.Reason("CODE", "<script>alert(1)</script> & \x1b[31m red")
    validation = lz.Validation(False, lz.Rows((hostile,), "reasons"))
    for one in (hostile, validation, validation.reasons):
        shown = one._repr_html_()
        assert "<script" not in shown and "&lt;script&gt;" in shown and "\x1b" not in shown
    assert "\x1b" not in str(validation) and "\\x1b[31m red" in str(validation)


def test_rows_are_a_sequence_that_equals_a_list() -> None:
    kernels = lz.list_kernels("rms_norm")
    assert kernels == list(kernels) and list(kernels) == kernels and kernels == lz.list_kernels("rms_norm")
    assert kernels != [] and kernels[1:] == list(kernels)[1:] and kernels[-1] in kernels
    assert isinstance(kernels[:2], lz.Rows) and len(kernels[:2]) == 2
    assert kernels.to_dict() == {"kernels": [kernel.to_dict() for kernel in kernels]}
    lines = str(kernels).splitlines()
    assert len(lines) == len(kernels) + 1 and lines[0].split()[:2] == ["kernel_id", "version"]
    assert str(lz.list_kernels("rms_norm")[:0]) == "no kernels"
    with pytest.raises(TypeError):
        hash(kernels)


def test_a_validation_is_true_where_the_kernel_is_valid() -> None:
    good, bad = lz.validate("torch.rms_norm", X), lz.validate("torch.sdpa.flash", Q, Q, Q, softcap=30.0)
    assert good and good == (True, []) and not bad
    valid, reasons = bad
    assert valid is False and [reason.code for reason in reasons] == ["PARAM_UNSUPPORTED"]
    assert "not valid" in str(bad) and bad.to_dict()["reasons"] == [reasons[0].to_dict()]


def test_rows_of_tuning_are_those_of_its_document() -> None:
    report = lz.tune("rms_norm", shapes=[(4, 16)], budget="500ms")
    (row,) = report.tuned
    assert report.to_dict()["tuned"] == [row.to_dict()]
    timed = {timing.candidate: timing.stats.median_us for timing in row.timings if timing.stats}
    assert row.chosen is not None and row.baseline is not None and row.times_baseline is not None
    assert row.times_baseline == pytest.approx(timed[row.baseline] / timed[row.chosen])


def test_regret_is_that_of_its_rows() -> None:
    report = lz.regret("rms_norm", shapes=[(4, 16), (64, 16)], budget="1s")
    over = [row.chosen_us / row.best_us for row in report.rows]
    assert len(over) == 2 and report.worst == pytest.approx(max(over))
    assert report.geomean == pytest.approx(math.sqrt(over[0] * over[1]))
    assert report.to_dict()["rows"][0]["call"] == report.rows[0].call


# --- workloads --------------------------------------------------------------------------------------------------------


def test_a_workload_is_what_tune_and_regret_measure() -> None:
    workload = lz.workload("rms_norm", dtype=torch.float32, shapes=[(4, 16), (8, 16)])
    assert isinstance(workload, lz.Workload) and workload.device == "cpu" and workload.counts == (1, 1)
    assert [row.call for row in lz.tune(workload, budget="1s").tuned] == list(workload)
    assert [row.call for row in lz.regret(workload, budget="1s").rows] == list(workload)
    assert lz.tune(calls=workload, budget="1s").known == 2
    assert workload == lz.workload("rms_norm", shapes=[(4, 16), (8, 16)]) == list(workload)
    assert "input float32[8, 16]" in str(workload) and workload.to_dict()["calls"] == list(workload)


def test_a_workload_of_a_model_is_tuned_as_the_model_is() -> None:
    workload = lz.workload(MODEL, X)
    again = pickle.loads(pickle.dumps(workload))
    assert again == workload and again.counts == workload.counts
    report = lz.tune(again, budget="1s")
    assert {row.op for row in report.tuned} == {call["op"] for call in workload} == {"norm.layer", "activation.gelu"}
    # It holds no module to run.
    assert report.forward is not None and report.forward.module_us is None
    assert report.forward.calls + report.forward.unknown == 2


def test_how_often_calls_are_made_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.tuning import api

    asked: list[dict[str, Any]] = []
    measure = api._measure
    monkeypatch.setattr(api, "_measure", lambda request, *a, **k: asked.append(request) or measure(request, *a, **k))
    shared = nn.GELU()
    model = nn.Sequential(shared, shared, shared)
    for given in (lambda: lz.tune(lz.workload(model, X), budget="200ms"), lambda: lz.tune(model, X, budget="200ms")):
        given()
    assert asked[0]["calls"] == asked[1]["calls"] and asked[0]["counts"] == asked[1]["counts"]
    assert sum(asked[0]["counts"]) == 3


def test_the_calls_of_the_process_are_tuned() -> None:
    lz.gelu(torch.ones(3, 1237))
    made = [entry for entry in lz.manifest() if entry.call["tensors"].get("input", {}).get("shape") == [3, 1237]]
    report = lz.tune(calls=made, budget="1s")
    assert [row.call for row in report.tuned] == [entry.call for entry in made] and len(made) == 1


@pytest.mark.parametrize("more", [{"dtype": "float32"}, {"shapes": [(1, 2)]}, {"hidden": 8}, {"calls": []}, {"seq": 4}])
def test_a_workload_says_all_there_is_to_measure(more: dict[str, Any]) -> None:
    workload = lz.workload("rms_norm", shapes=[(4, 16)])
    for measure in (lz.tune, lz.regret):
        with pytest.raises(
            lz.ConfigurationError, match=f"a workload is given, and with it {next(iter(more))}"
        ) as raised:
            measure(workload, budget="1s", **more)
        assert raised.value.code == "BAD_REQUEST" and "alone" in raised.value.hint


# --- old names and forms ----------------------------------------------------------------------------------------------


def quiet(call: Callable[[], Any]) -> Any:
    """The result of a call that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        return call()


@pytest.mark.usefixtures("unwarned")
def test_a_kernel_is_forced_by_the_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"lz\.lock is now lz\.force_kernel") as caught:
        lz.lock("rms_norm", "torch.rms_norm.composed")
    assert caught[0].filename == __file__
    assert lz.which("rms_norm", X).kernel_id == "torch.rms_norm.composed"
    # Once.
    quiet(lambda: lz.lock("rms_norm", "lz_cpu.ref.norm.rms"))
    assert lz.explain("rms_norm", X).basis == "locked"
    quiet(lambda: lz.lock("rms_norm", "nobody.rms_norm", optional=True))
    with pytest.warns(DeprecationWarning, match=r"lz\.unlock is now lz\.unforce_kernel"):
        lz.unlock("rms_norm")
    assert lz.explain("rms_norm", X).basis != "locked"
    with pytest.raises(lz.ConfigurationError, match="nobody"):
        lz.lock("rms_norm", "nobody.rms_norm")


@pytest.mark.usefixtures("unwarned")
def test_pins_and_rollouts_by_the_old_names(tmp_path: Path) -> None:
    lz.force_kernel("gelu", "lz_cpu.ref.activation.gelu")
    path = lz.write_lockfile(tmp_path / "layerzero.lock", calls=lz.calls_of(nn.GELU(), X))
    lz.unforce_kernel("gelu")
    before = lz.which("gelu", X)
    assert quiet(lambda: lz.load_lockfile(path)) == [] and lz.which("gelu", X) != before
    with pytest.warns(DeprecationWarning, match=r"lz\.unpin is now lz\.release_pins"):
        lz.unpin()
    assert lz.which("gelu", X) == before
    with (
        pytest.warns(DeprecationWarning, match=r"lz\.rearm is now lz\.restart_rollout"),
        pytest.raises(lz.ConfigurationError, match="no rollout 'nobody'"),
    ):
        lz.rearm("nobody")


@pytest.mark.parametrize(
    ("old", "new"),
    [("lock", "force_kernel"), ("unlock", "unforce_kernel"), ("rearm", "restart_rollout"), ("unpin", "release_pins")],
)
def test_old_names_take_what_the_new_ones_take(old: str, new: str) -> None:
    alias, function = getattr(lz, old), getattr(lz, new)
    assert inspect.signature(alias) == inspect.signature(function) and alias.__name__ == old
    assert "Deprecated" in (alias.__doc__ or "") and old not in dir(lz) and new in dir(lz)


@pytest.mark.usefixtures("unwarned")
def test_answers_that_were_dicts_are_indexed_with_a_warning() -> None:
    chosen = lz.which("rms_norm", X)
    with pytest.warns(DeprecationWarning, match=r"Selection is no dict any more: use \.kernel_id") as caught:
        assert chosen["kernel_id"] == chosen.kernel_id
    assert caught[0].filename == __file__
    assert quiet(lambda: dict(chosen)) == quiet(lambda: {**chosen}) == chosen.to_dict()
    assert "op" in chosen and "kernel" not in chosen and sorted(chosen) == ["kernel_id", "op", "score", "version"]
    assert chosen.get("version") == chosen.version and chosen.get("more", 3) == 3
    assert dict(chosen.items()) == chosen.to_dict() and next(iter(chosen.values())) == chosen.op
    with pytest.raises(KeyError):
        chosen["more"]


def test_a_mismatch_has_the_fields_of_its_code(tmp_path: Path) -> None:
    (one, *_) = lz.load_table(broken_table(tmp_path))
    assert one.code == "KERNEL_GONE" and one.kernel == "no.such.kernel" and "not there" in one.message
    assert set(one.fields) == {"nearest"} and one.to_dict()["nearest"] == one.fields["nearest"]
    assert isinstance(one, KeyedResult) and "nearest" in one.to_dict()


def test_the_package_shows_its_public_names() -> None:
    assert dir(lz) == sorted(lz.__all__)
    assert not hasattr(lz, "no_such_thing")
    with pytest.raises(AttributeError, match="module 'layerzero' has no attribute 'attentoin'"):
        lz.attentoin  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from layerzero import nothing_of_that_name  # type: ignore[attr-defined]  # noqa: F401
