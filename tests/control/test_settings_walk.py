"""Every setting has an effect: each is changed, and something that can be observed changes with it.

Three places together hold all of them: ``OBSERVED`` here, ``WALK`` in ``crates/layerzero/tests/control/walk.rs`` (settings
the engine acts on, by a clock moved by hand), and ``TESTED``: tests of their own that need more than a line.
"""

from __future__ import annotations

import json
import queue
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from described import command
from in_force import X, chosen
from layerzero import _native
from listening import listening
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("restored"),
]

ROOT = Path(__file__).parents[2]
Q = torch.linspace(-1.0, 1.0, 2 * 3 * 4 * 8).reshape(2, 3, 4, 8)


@pytest.fixture(autouse=True)
def own_database(restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is measured here is none of the other tests' business."""
    monkeypatch.setenv("LAYERZERO_PERFDB_PATH", str(tmp_path / "walk.sqlite"))
    _native.load_sources()
    yield
    monkeypatch.undo()
    _native.load_sources()


def outcome(call: Callable[[], Any]) -> str:
    """What a call gives, or raises, in words that can be compared."""
    try:
        given = call()
    except lz.LayerZeroError as error:
        return f"{type(error).__name__} {error.code}"
    return str(given.tolist() if isinstance(given, Tensor) else given)


@pytest.fixture
def wrong_kernel() -> Iterator[None]:
    """A kernel that gives NaN and comes before all others."""
    given: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    @lz.register_kernel(kernel_id="wrong.norm", priority=99, **given)
    def wrong(input: Tensor, eps: float) -> Tensor:
        return input * float("nan")

    yield
    lz.unregister_kernel("wrong.norm")


def logged() -> str:
    """How many selections of a new kind of call are logged."""
    with listening() as heard:
        lz.rms_norm(torch.ones(3, 40))
        return str(heard.qsize())


def transposed() -> str:
    """Attention on a tensor whose strides are those of the other layout."""
    x = Q.transpose(1, 2).contiguous().transpose(1, 2)
    return outcome(lambda: lz.attention(x, x, x).shape)


def paged() -> str:
    """Paged attention that does not say its layout: pages of five slots and four heads, or the other way round."""
    cache = torch.linspace(-1.0, 1.0, 2 * 5 * 4 * 8).reshape(2, 5, 4, 8)
    tables, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    return outcome(lambda: lz.paged_attention(torch.ones(1, 4, 8), cache, cache, tables, lengths))


def adapted() -> str:
    """The kernels that take a tensor which does not lie row by row."""
    report = lz.explain("rms_norm", torch.ones(8, 4).T)
    return str(sorted(candidate.kernel_id for candidate in report.candidates if not candidate.reasons))


def in_a_graph() -> str:
    """What a described GPU takes inside of a capture."""
    asked = ("explain", "rms_norm", "--device", "h100", "--shape", "input=4,64", "--dtype", "bf16", "--capturing")
    return command(*asked)


def decisions() -> str:
    """How many of three calls of one kind have to be decided."""
    lz.configure(log_selections=True)
    with listening() as heard:
        for _ in range(3):
            lz.rms_norm(torch.ones(3, 48))
        return str(heard.qsize())


def learned() -> str:
    """Whether anything is known of a call that was measured."""
    lz.tune("gelu", shapes=[(4, 16)], dtype="float32", device="cpu", budget=5, samples=1, progress=False)
    return str(lz.health().perfdb["known"] > 0)


def fetched() -> str:
    """Whether a tokenizer that is not here is asked for elsewhere."""
    with pytest.MonkeyPatch.context() as patched:
        asked: list[object] = []
        patched.setattr(socket.socket, "connect", lambda *given: asked.append(given))

        def nowhere(*given: object, **_: object) -> None:
            asked.append(given)
            raise socket.gaierror("no such host")

        patched.setattr(socket, "getaddrinfo", nowhere)
        # The library asks again and again, and waits longer each time.
        patched.setattr(time, "sleep", lambda _: None)
        with pytest.raises(lz.UnknownTokenizerError):
            lz.tokenize("a", "no/such-model")
        return str(bool(asked))


def memory_check() -> str:
    """What the readiness check says of memory."""
    (check,) = (check for check in lz.readiness_check().checks if check.name == "memory")
    return f"{check.status} {check.detail}"


def why_not_compiled() -> str:
    """Whether a kernel that would have to be compiled may be."""
    given: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    @lz.register_kernel(kernel_id="cold.norm", priority=1, jit=True, **given)
    def cold(input: Tensor, eps: float) -> Tensor:
        return input

    try:
        return str([reason.code for reason in lz.validate("cold.norm", X)[1]])
    finally:
        lz.unregister_kernel("cold.norm")


def waits_for_the_device() -> str:
    """Whether a call waits until the device is done."""
    waited: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("layerzero.checks.synchronize", lambda: waited.append(1))
        lz.rms_norm(torch.ones(3, 56))
    return str(len(waited))


def timed() -> str:
    """How many of a kernel's calls are timed."""
    before = lz.health().kernels.get("torch.rms_norm", {}).get("latency_samples", 0)
    with lz.prefer("torch"):
        for _ in range(200):
            lz.rms_norm(X)
    return str(lz.health().kernels["torch.rms_norm"]["latency_samples"] - before > 100)


def rounds() -> str:
    """How many rounds a measured call gets at least, where nobody says: the kernels of a call that ties go through more."""
    measure, asked = _native.measure, []

    def noted(request: str, seconds: float, samples: int, *rest: Any) -> str:
        asked.append(samples)
        return measure(request, seconds, samples, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_native, "measure", noted)
        lz.tune("gelu", shapes=[(4, 8)], dtype="float32", device="cpu", budget=0.01, force=True, progress=False)
    return str(asked)


def old_calls() -> str:
    """How many calls of a month ago count."""
    lz.rms_norm(X)
    path = lz.save_manifest()
    document = json.loads(path.read_text())
    month_ago = re.sub(r'"last_seen": ?\d+', '"last_seen": 1', json.dumps(document))
    path.write_text(re.sub(r'"first_seen": ?\d+', '"first_seen": 1', month_ago))
    try:
        return str(len(json.loads(_native.read_manifest(None, None)[0])) > 0)
    finally:
        path.unlink()


def watched() -> str:
    """Whether a file that was loaded is watched, by what the system says of this process."""
    links = (str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return str(sum("inotify" in link for link in links))


#: By setting: another value than its default, and what is observed.
OBSERVED: dict[str, tuple[Any, Callable[[], str]]] = {
    "enabled": (False, chosen),
    "log_selections": (True, logged),
    "explain_enabled": (False, lambda: outcome(lambda: lz.explain("rms_norm", X).op)),
    "strict_mode": (True, transposed),
    "default_layout": ("BHSD", lambda: outcome(lambda: lz.attention(Q, Q, Q))),
    "default_cache_layout": ("HND", paged),
    "allow_adaptation": (False, adapted),
    "allow_jit": (False, why_not_compiled),
    "max_cpu_isa": ("baseline", lambda: str(lz.explain("rms_norm", X))),
    "memory_headroom_mb": (0, memory_check),
    "debug": (True, waits_for_the_device),
    "cache.enabled": (False, decisions),
    "cache.max_size": (1, decisions),
    "perfdb.enabled": (False, learned),
    "perfdb.tune_samples": (40, rounds),
    "jit.manifest_stale_days": (0, old_calls),
    "tokenizer.allow_download": (True, fetched),
    "health.sample_every": (1, timed),
}
#: Settings of the specification with one value so far: the others are refused.
REFUSED = {"plan_mode": True, "backend_isolation": "subprocess"}

#: Settings with tests of their own: the file, and the test that changes it.
TESTED = {
    "compile.lowering": ("tests/torch/test_compile_lowering.py", "test_lowering_can_be_turned_off"),
    "compile.recompile": ("tests/torch/test_compile_lowering.py", "test_what_compiles_a_graph_again"),
    "shared_prefixes": (
        "tests/backends/test_backend_triton_decode.py",
        "test_how_many_sequences_are_worked_on_together",
    ),
    "graph_strict_mode": ("crates/layerzero/tests/control/readiness.rs", "graph_strict_mode"),
    "checked": ("tests/control/test_settings_walk.py", "test_a_wrong_kernel_is_found_where_somebody_looks"),
    "verify": ("tests/control/test_settings_walk.py", "test_a_wrong_kernel_is_found_where_somebody_looks"),
    "verbose": ("tests/control/test_settings_walk.py", "test_verbose_prints_what_happens"),
    "policy": ("tests/control/test_settings_walk.py", "test_a_file_says_what_is_in_force"),
    "watch": ("tests/control/test_settings_walk.py", "test_a_file_says_what_is_in_force"),
    "lockfile": ("tests/control/test_settings_walk.py", "test_files_that_are_named_are_read"),
    "dispatch_table": ("tests/control/test_settings_walk.py", "test_files_that_are_named_are_read"),
    "perfdb.path": ("tests/control/test_settings_walk.py", "test_files_are_written_where_settings_say"),
    "jit.manifest_path": ("tests/control/test_settings_walk.py", "test_files_are_written_where_settings_say"),
    "allow_project_paths": ("crates/lz-config/tests/paths.rs", "allow_project_paths: ["),
    "watch_debounce_ms": ("tests/control/test_settings_walk.py", "test_a_changed_file_is_read_when_it_is_quiet"),
    "perfdb.auto_tune": ("tests/tuning/test_auto_tuning.py", "test_what_is_called_is_measured"),
    "perfdb.auto_tune_budget_s": ("tests/tuning/test_auto_tuning.py", "test_the_budget_is_kept"),
    "perfdb.auto_tune_share": ("tests/tuning/test_auto_tuning.py", "test_a_share_of_the_time_is_rest"),
    "perfdb.auto_tune_on_warmup": ("tests/tuning/test_warm_up.py", "test_tuning_comes_with_it_when_asked_for"),
    "perfdb.priors": ("tests/tuning/test_priors.py", "test_they_can_be_turned_off"),
    "perfdb.ttl_days": ("tests/control/test_settings_walk.py", "test_old_measurements_do_not_count"),
    "jit.background_compile": ("tests/tuning/test_warm_up.py", "test_the_background_can_be_turned_off"),
    "jit.queue_size": ("tests/tuning/test_warm_up.py", "test_what_a_full_queue_drops_is_the_oldest"),
    "jit.fail_on_no_fallback": ("tests/tuning/test_warm_up.py", "test_calls_nobody_else_can_serve"),
    "graph.memory_delta_warning_mb": ("tests/torch/test_graphs.py", "test_the_limits_are_settings"),
    "graph.warmup_iterations": ("tests/torch/test_graphs.py", "test_a_recording_makes_ready_and_holds_what_it_chose"),
    "backends.unproven": ("tests/backends/test_unproven.py", "test_one_that_is_named_is_loaded"),
    "backends.hub_allow": ("tests/backends/test_backend_hub.py", "test_nothing_runs_that_was_not_allowed"),
    "backends.hub_lockfile": (
        "tests/backends/test_backend_hub.py",
        "test_a_file_that_is_not_the_one_that_was_locked_is_refused",
    ),
    "tokenizer.cache_mb": ("tests/tokenize/test_tokenize_control.py", "test_a_hit_does_not_call_the_library"),
}


def test_every_setting_is_in_one_place() -> None:
    rust = (ROOT / "crates/layerzero/tests/control/walk.rs").read_text(encoding="utf-8")
    walked = set(re.findall(r'^    \("([a-z_.]+)", \|\|', rust, re.MULTILINE))
    assert len(walked) > 20
    assert {
        s.key for s in lz.settings() if "[" not in s.key
    } == walked | OBSERVED.keys() | REFUSED.keys() | TESTED.keys()


@pytest.mark.parametrize("key", TESTED)
def test_settings_with_tests_of_their_own(key: str) -> None:
    file, name = TESTED[key]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert name in text and key.rpartition(".")[2] in text, f"{file}: {name} does not change {key}"


@pytest.mark.parametrize("key", OBSERVED)
def test_a_setting_that_changes_changes_something(key: str) -> None:
    other, observe = OBSERVED[key]
    before = observe()
    group, _, name = key.rpartition(".")
    lz.configure(**({group: {name: other}} if group else {key: other}))
    after = observe()
    assert before != after, f"{key} has no effect: {after}"
    lz.reset()
    assert observe() == before, f"{key}: something else changed what is observed"


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_that_is_not_supported_is_refused(key: str) -> None:
    with pytest.raises(lz.ConfigurationError, match=rf"{key}: .* is not supported yet: "):
        lz.configure(**{key: REFUSED[key]})
    default = {s.key: s.value for s in lz.settings()}[key]
    lz.configure(**{key: default})


def test_a_wrong_kernel_is_found_where_somebody_looks(wrong_kernel: None) -> None:
    assert lz.rms_norm(X).isnan().all(), "verify is off in these tests"
    for looking in ({"checked": True}, {"verify": "first_use"}):
        lz.configure(**looking)
        assert not lz.rms_norm(X).isnan().any(), looking
        lz.reset()
        lz.forget_failures()


def test_verbose_prints_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    lz.rms_norm(torch.ones(3, 72))
    assert capsys.readouterr().err == ""
    lz.configure(verbose=True)
    lz.rms_norm(torch.ones(3, 80))
    assert re.fullmatch(r"layerzero: norm.rms: \S+ serves rows=3 hidden=80\n", capsys.readouterr().err)
    with listening() as heard:
        lz.rms_norm(torch.ones(3, 88))
        assert heard.qsize() == 1 and capsys.readouterr().err == "", "whoever listens is told, and nothing is printed"


def test_a_file_says_what_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    document = """
schema_version: 2
kernels:
  norms:
    operation: norm.rms
    implementations:
      - {name: torch.rms_norm.composed}
policies:
  careful:
    deny_rules:
      - kernel: torch.rms_norm
"""
    file.write_text(document)
    lz.load_config(file)
    before, quiet = chosen(), watched()
    file.write_text(document + "policy: careful\nwatch: true\n")
    lz.load_config(file)
    assert (before != chosen(), quiet != watched()) == (True, True)


def test_files_that_are_named_are_read(tmp_path: Path) -> None:
    for key in ("lockfile", "dispatch_table"):
        with pytest.raises(lz.ConfigurationError, match="none.json"):
            lz.configure(**{key: str(tmp_path / "none.json")})
    assert "lockfile" in command("config", "show") and "dispatch_table" in command("config", "show")


def test_files_are_written_where_settings_say(tmp_path: Path) -> None:
    lz.configure(perfdb={"path": str(tmp_path / "own.sqlite")}, jit={"manifest_path": str(tmp_path / "own.json")})
    lz.tune("gelu", shapes=[(2, 8)], dtype="float32", device="cpu", budget=5, samples=1, progress=False)
    lz.rms_norm(X)
    assert lz.save_manifest() == tmp_path / "own.json"
    assert {"own.sqlite", "own.json"} <= {file.name for file in tmp_path.iterdir()}


def test_a_changed_file_is_read_when_it_is_quiet(tmp_path: Path) -> None:
    def reloads_within(seconds: float, watch_debounce_ms: int) -> bool:
        file = tmp_path / f"{watch_debounce_ms}.yaml"
        file.write_text(f"watch: true\nwatch_debounce_ms: {watch_debounce_ms}\n")
        lz.load_config(file)
        with listening() as heard:
            file.write_text(f"watch: true\nwatch_debounce_ms: {watch_debounce_ms}\nmemory_headroom_mb: 7\n")
            try:
                heard.get(timeout=seconds)
            except queue.Empty:
                return False
            return True

    assert not reloads_within(0.3, 60_000), "it waits until the file was quiet for a minute"
    assert reloads_within(30, 5)


def test_old_measurements_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    lz.configure(perfdb={"path": str(path)})
    lz.tune("gelu", shapes=[(2, 8)], dtype="float32", device="cpu", budget=5, samples=1, progress=False)
    assert lz.health().perfdb["known"] > 0
    lz.reset()
    with sqlite3.connect(path) as database:
        (table,) = database.execute(
            "select name from sqlite_master where type='table' and sql like '%measured_at%'"
        ).fetchone()
        database.execute(f"update {table} set measured_at = 1000")
    lz.configure(perfdb={"path": str(path), "ttl_days": 1})
    assert lz.health().perfdb["known"] == 0
