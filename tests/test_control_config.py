"""Configuration: what is said where, what is refused and how, and files that change while calls are made."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from layerzero import _native
from processes import answer, python

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
PLAIN, COMPOSED, REFERENCE = "torch.rms_norm", "torch.rms_norm.composed", "lz_cpu.ref.norm.rms"
#: How long anything that is waited for may take before the test fails.
PATIENCE = 30


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The files and the environment of the tests themselves, and nothing said by code."""
    fresh()
    yield
    _native.load_sources()
    fresh()


def chosen() -> str:
    """Who serves rms_norm, by what is asked and by what is answered."""
    told = str(lz.which("rms_norm", X)["kernel_id"])
    right = X * torch.rsqrt(X.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(lz.rms_norm(X), right, rtol=1e-5, atol=1e-5)
    return told


def said(key: str) -> lz.Setting:
    """A setting in force."""
    (found,) = (setting for setting in lz.settings() if setting.key == key)
    return found


def changed() -> dict[str, Any]:
    """Everything that is not as it is by default."""
    return {setting.key: setting.value for setting in lz.settings() if setting.origin["layer"] != "default"}


# --- code -------------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_key_a_value_and_an_origin() -> None:
    found = {setting.key: setting for setting in lz.settings()}
    assert len(found) >= 40 and all(setting.origin == {"layer": "default"} for setting in found.values())
    # 000 appendix B, as written there.
    for key, value in {
        "enabled": True,
        "fallback_enabled": True,
        "log_selections": False,
        "deterministic": False,
        "strict_mode": False,
        "plan_mode": False,
        "allow_adaptation": True,
        "memory_headroom_mb": 1024,
        "avoid_sources": [],
        "perfdb.enabled": True,
        "perfdb.path": "~/.cache/layerzero/perfdb.sqlite",
        "perfdb.auto_tune": False,
        "perfdb.tune_samples": 20,
        "cache.enabled": True,
        "cache.max_size": 10000,
    }.items():
        assert found[key].value == value, key


def test_code_says_and_takes_back() -> None:
    lz.configure(deterministic=True, breaker={"timeout_ms": 7}, cache__max_size=99, prefer_sources=("torch",))
    assert changed() == {
        "deterministic": True,
        "breaker.timeout_ms": 7,
        "cache.max_size": 99,
        "prefer_sources": ["torch"],
    }
    assert said("breaker.timeout_ms").origin == {"layer": "code"}
    lz.configure(deterministic=None, cache__max_size=None)
    assert changed() == {"breaker.timeout_ms": 7, "prefer_sources": ["torch"]}
    lz.reset()
    assert changed() == {}


def test_a_section_adds_to_what_was_said_of_it() -> None:
    lz.configure(breaker={"timeout_ms": 7})
    lz.configure(breaker={"failure_threshold": 3})
    assert changed() == {"breaker.timeout_ms": 7, "breaker.failure_threshold": 3}
    lz.configure(breaker=None)
    assert changed() == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fallback_enabeld": True}, ["fallback_enabeld", "did you mean 'fallback_enabled'?"]),
        ({"breaker__timeout_ms": "soon"}, ["breaker.timeout_ms", "an integer from 1 to", '"soon"']),
        ({"breaker": {"timeout": 3}}, ["breaker.timeout", "did you mean 'timeout_ms'?"]),
        ({"breaker__timeout_ms": 0}, ["breaker.timeout_ms", "from 1 to 86400000", "found 0"]),
        ({"breaker__timeout_ms": -(2**63)}, ["breaker.timeout_ms", "from 1 to 86400000"]),
        ({"breaker__timeout_ms": 2**80}, ["breaker.timeout_ms"]),
        ({"breaker__timeout_ms": 1.5}, ["breaker.timeout_ms", "1.5"]),
        ({"breaker__timeout_ms": float("nan")}, ["breaker.timeout_ms"]),
        ({"checked": 1}, ["checked", "true or false", "found 1"]),
        ({"checked": object()}, ["checked"]),
        ({"checked": {1: 2}}, ["checked"]),
        ({"prefer_sources": [3]}, ["prefer_sources"]),
        ({"prefer_sources": b"torch"}, ["prefer_sources"]),
        ({"backend_isolation": "subproces"}, ["backend_isolation", "did you mean 'subprocess'?"]),
        ({"policy": "production"}, ["policy", "production"]),
        ({"degradation": {"cached_health": 90}}, ["degradation.cached_health", "90", "reduced_health"]),
        ({"breaker": {"timeout_ms": 1000, "max_timeout_ms": 10}}, ["breaker.max_timeout_ms", "10"]),
        ({"rules": [{"prefer": "x"}, {"lock": 3}]}, ["rules[1].lock", "3"]),
        ({"rules": [{"match": {"sm": ">=90"}}]}, ["rules[0]", "does nothing"]),
        ({"rules": [{"when": "seq_len >", "deny": "x"}]}, ["rules[0].when", "column"]),
        ({"rules": [{"operation": "atention", "deny": "x"}]}, ["rules[0].operation", "did you mean 'attention'?"]),
        ({"rollouts": [{"name": "a"}]}, ["rollouts[0]", "'operation' is missing", "'mode' is missing"]),
        ({"locks": {"rms_nrm": "x"}}, ["locks.rms_nrm", "did you mean 'rms_norm'?"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_and_changes_nothing(settings: dict[str, Any], words: list[str]) -> None:
    lz.configure(cache__max_size=77)
    with pytest.raises(lz.ConfigurationError) as caught:
        # All or none: what is right beside it is not taken either.
        lz.configure(deterministic=True, **settings)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "nothing was changed" in caught.value.hint and "config reference" in caught.value.hint
    assert changed() == {"cache.max_size": 77}


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    with pytest.raises(lz.ConfigurationError) as caught:
        lz.configure(chekced=True, breaker={"timeout_ms": "x", "half": 1}, avoid_sources=3)
    assert len(caught.value.message.splitlines()) == 4


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_leaves_one_kernel_and_unlocking_all_of_them() -> None:
    assert chosen() == PLAIN
    lz.lock("rms_norm", COMPOSED)
    assert chosen() == COMPOSED and changed() == {"locks.norm.rms": COMPOSED}
    report = lz.explain("rms_norm", X)
    assert report.basis == "locked" and f"lock norm.rms to {COMPOSED} (code)" in str(report)
    lz.lock("norm.rms", REFERENCE)
    assert chosen() == REFERENCE
    lz.unlock("rms_norm")
    assert chosen() == PLAIN
    lz.lock("rms_norm", COMPOSED)
    lz.reset()
    assert chosen() == PLAIN


def test_a_lock_on_a_kernel_that_cannot_serve_is_an_error_that_says_why() -> None:
    lz.lock("rms_norm", "zentorch.rms_norm")
    for _ in range(3):
        with pytest.raises(lz.NoKernelFoundError) as caught:
            lz.rms_norm(X)
    assert {r.code for r in caught.value.failures["zentorch.rms_norm"]} == {"NOT_INSTALLED"}
    assert "POLICY_LOCKED" in {r.code for r in caught.value.failures[PLAIN]}
    lz.lock("rms_norm", "nobody.at_all")
    with pytest.raises(lz.NoKernelFoundError, match="'nobody.at_all' is locked"):
        lz.rms_norm(X)
    assert lz.which("gelu", X)["kernel_id"] == "torch.gelu"


def test_an_alias_is_locked_for_the_calls_it_is_about() -> None:
    q = torch.randn(1, 20, 2, 16)
    lz.lock("attention.causal", "torch.attention.unfused")
    assert lz.which("attention", q, q, q)["kernel_id"] == "torch.attention.unfused"
    assert lz.which("attention", q, q, q, causal=False)["kernel_id"] != "torch.attention.unfused"


@pytest.mark.parametrize("name", ["rms_nrm", "norm", ""])
def test_a_lock_on_no_operation_is_refused(name: str) -> None:
    with pytest.raises(lz.ConfigurationError) as caught:
        lz.lock(name, COMPOSED)
    assert name in str(caught.value)
    with pytest.raises(lz.ConfigurationError):
        lz.unlock(name)
    assert changed() == {}


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ({"prefer": COMPOSED}, COMPOSED),
        ({"prefer": "torch.*.composed"}, COMPOSED),
        ({"avoid": PLAIN}, COMPOSED),
        ({"boost": {"kernel": COMPOSED, "points": 11}}, COMPOSED),
        ({"boost": {"kernel": COMPOSED, "points": 9}}, PLAIN),
        ({"priority": {"kernel": COMPOSED, "points": 60}}, COMPOSED),
        ({"override": REFERENCE}, REFERENCE),
        ({"deny": PLAIN}, COMPOSED),
        ({"deny_sources": ["torch"]}, REFERENCE),
        ({"filter": "priority < 50"}, COMPOSED),
        ({"lock": COMPOSED}, COMPOSED),
        ({"operation": "gelu", "deny": "torch.*"}, PLAIN),
        ({"operation": "norm.*", "deny": PLAIN}, COMPOSED),
        ({"operation": ["gelu", "rms_norm"], "deny": PLAIN}, COMPOSED),
        ({"match": {"hidden": ">=8"}, "deny": PLAIN}, COMPOSED),
        ({"match": {"hidden": ">8"}, "deny": PLAIN}, PLAIN),
        ({"match": {"operation": "norm.rms", "rows": [4, 5]}, "deny": PLAIN}, COMPOSED),
        ({"when": "rows * hidden == 32", "deny": PLAIN}, COMPOSED),
        ({"condition": ["rows > 2", "hidden > 100"], "deny": PLAIN}, PLAIN),
    ],
    ids=str,
)
def test_rules_do_what_they_say(rule: dict[str, Any], wanted: str) -> None:
    if "when" in rule or "condition" in rule:
        rule = {"operation": "rms_norm", **rule}
    lz.configure(rules=[{"name": "mine", **rule}])
    assert chosen() == wanted
    report = lz.explain("rms_norm", X)
    assert any("mine (code)" in name for name in report.to_dict()["rules"]) == (wanted != PLAIN or "boost" in rule)
    lz.configure(rules=None)
    assert chosen() == PLAIN


def test_a_deny_wins_over_everything_that_is_in_favour() -> None:
    lz.configure(
        prefer_sources=["torch"],
        rules=[{"boost": {"kernel": PLAIN, "points": 1000}}, {"override": PLAIN}, {"prefer": PLAIN}, {"deny": PLAIN}],
    )
    assert chosen() == COMPOSED
    (reason,) = next(c.reasons for c in lz.explain("rms_norm", X).candidates if c.kernel_id == PLAIN)
    assert reason.code == "POLICY_DENIED"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_taken_with_where_everything_was_said(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(
        "version: 1\nmemory_headroom_mb: 5\nbreaker:\n  timeout_ms: 9\nlocks:\n  rms_norm: torch.rms_norm.composed\n"
        "include: [more.yaml]\n"
    )
    (tmp_path / "more.yaml").write_text("memory_headroom_mb: 6\ncache:\n  max_size: 55\n")
    lz.load_config(file)
    at = {setting.key: setting.origin for setting in lz.settings()}
    assert at["memory_headroom_mb"] == {"layer": "project_file", "path": str(file), "line": 2, "column": 1}
    assert at["breaker.timeout_ms"]["line"] == 4 and at["breaker.timeout_ms"]["column"] == 3
    assert at["locks.norm.rms"]["line"] == 6
    assert at["cache.max_size"] == {"layer": "included", "path": str(tmp_path / "more.yaml"), "line": 3, "column": 3}
    assert said("memory_headroom_mb").value == 5, "the file stands above what it includes"
    assert chosen() == COMPOSED
    lz.unlock("rms_norm")
    assert chosen() == PLAIN, "a lock of a file can be taken back"
    lz.reset()
    assert chosen() == COMPOSED


BROKEN = {
    "unknown key": ("version: 1\nfallback_enabeld: true\n", [":2:1:", "fallback_enabeld", "'fallback_enabled'"]),
    "wrong value": ("breaker:\n  timeout_ms: soon\n", [":2:15:", "breaker.timeout_ms", '"soon"']),
    "in a list": ("rules:\n  - deny: x\n    prefr: y\n", [":3:5:", "rules[0].prefr", "'prefer'"]),
    "operation": ("locks:\n  atention: x\n", [":2:3:", "locks.atention", "'attention'"]),
    "syntax": ("prefer_sources: [torch\n", [":1:17:", "bracket"]),
    "twice": ("checked: true\nchecked: false\n", [":2:1:", "checked", "first on line 1"]),
    "alias": ("a: &a [1]\nb: *a\n", [":1:7:", "anchors"]),
    "version": ("version: 9\n", [":1:10:", "version 9"]),
    "include": ("include: [nobody.yaml]\n", [":1:11:", "nobody.yaml", "cannot be read"]),
    "circle": ("include: [layerzero.yaml]\n", ["in a circle"]),
    "huge number": ("cache:\n  max_size: 99999999999999999999999999\n", [":2:13:", "cache.max_size"]),
    "not UTF-8": (b"version: 1\n# \xff\n", ["UTF-8"]),
    "a lot": ("#" * 2_000_000, ["larger than"]),
    "deep": ("[" * 5000, ["deep"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_with_a_mistake_is_refused_with_its_place_and_changes_nothing(what: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "layerzero.yaml"
    good.write_text("version: 1\ncache:\n  max_size: 55\nlocks:\n  rms_norm: torch.rms_norm.composed\n")
    lz.load_config(good)
    text, words = BROKEN[what]
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(lz.ConfigurationError) as caught:
        lz.load_config(bad)
    message = str(caught.value)
    assert str(bad) in message and all(word in message for word in words), message
    assert len(message) < 2000
    assert said("cache.max_size").value == 55 and chosen() == COMPOSED
    assert not lz.health().well and message.partition(" ")[2].splitlines()[0] in str(lz.health().reloads["last_error"])
    lz.load_config(good)
    assert lz.health().well


@pytest.mark.parametrize("path", ["nowhere.yaml", ".", "/dev/zero", "/dev/null/x"])
def test_what_is_no_file_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(lz.ConfigurationError, match="cannot be read|only regular files"):
        lz.load_config(tmp_path / path)


def test_a_file_is_found_again_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layerzero.yaml").write_text("cache:\n  max_size: 55\n")
    monkeypatch.chdir(tmp_path)
    lz.load_config("layerzero.yaml")
    assert said("cache.max_size").value == 55
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "layerzero.yaml").write_text("cache:\n  max_size: 56\n")
    lz.reload()
    assert said("cache.max_size").value == 56


def test_reloading_takes_what_is_new_and_keeps_what_code_said(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("memory_headroom_mb: 5\nlocks:\n  rms_norm: torch.rms_norm.composed\n")
    lz.load_config(file)
    lz.configure(cache__max_size=77)
    before = lz.health().reloads["succeeded"]
    assert chosen() == COMPOSED
    file.write_text("memory_headroom_mb: 6\ncache:\n  max_size: 1\n")
    assert chosen() == COMPOSED, "nobody is watching"
    lz.reload()
    assert chosen() == PLAIN and said("memory_headroom_mb").value == 6 and said("cache.max_size").value == 77
    assert lz.health().reloads["succeeded"] == before + 1


def test_a_reload_that_is_refused_keeps_the_last_good_one(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text("locks:\n  rms_norm: torch.rms_norm.composed\n")
    lz.load_config(file)
    before = lz.health().reloads
    with listening() as heard:
        for text in ("lokcs: {}\n", "locks: [\n", ""):
            file.write_text(text)
            if text:
                with pytest.raises(lz.ConfigurationError):
                    lz.reload()
                assert chosen() == COMPOSED
        refused = [heard.get(timeout=PATIENCE) for _ in range(2)]
    assert [record.event for record in refused] == ["reload_refused"] * 2
    assert refused[0].levelno == logging.ERROR and "lokcs" in refused[0].layerzero["error"]
    assert str(file) in refused[0].getMessage()
    health = lz.health()
    assert health.reloads["refused"] == before["refused"] + 2 and "unclosed" in health.reloads["last_error"]
    assert not health.well and "the last one was refused" in str(health)
    lz.reload()
    assert lz.health().well and lz.health().reloads["last_error"] is None and chosen() == PLAIN
    assert lz.health().reloads["refused"] == before["refused"] + 2


# --- files that change by themselves ----------------------------------------------------------------------------------


class Listening(logging.Handler):
    """Everything the package logs, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[Any] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def __enter__(self) -> queue.Queue[Any]:
        logger = logging.getLogger("layerzero")
        self.before = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.records

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("layerzero")
        logger.removeHandler(self)
        logger.setLevel(self.before)


def listening() -> Listening:
    """Hears what is logged inside."""
    return Listening()


def text(kernel: str, **more: Any) -> str:
    """A file that is watched, with a lock."""
    lines = ["watch: true", "watch_debounce_ms: 5", f"locks:\n  rms_norm: {kernel}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in more.items())]) + "\n"


def wait_for(heard: queue.Queue[Any], event: str) -> Any:
    """The next event of that name."""
    while True:
        record = heard.get(timeout=PATIENCE)
        if record.event == event:
            return record


def rewritten(file: Path, text: str) -> None:
    """In place, as an editor may do it."""
    file.write_text(text)


def renamed_over(file: Path, text: str) -> None:
    """As careful programs do it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def swapped(file: Path, text: str) -> None:
    """As Kubernetes mounts a ConfigMap: the file is a link into `..data`, which is a link that is swapped."""
    folder = file.parent
    count = len(list(folder.glob("..20*")))
    version = folder / f"..20{count:02d}"
    version.mkdir()
    (version / file.name).write_text(text)
    if not file.is_symlink():
        file.unlink(missing_ok=True)
        (folder / "..data").symlink_to(version.name)
        file.symlink_to(f"..data/{file.name}")
        return
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").rename(folder / "..data")


WAYS = {"rewritten": rewritten, "renamed": renamed_over, "ConfigMap": swapped}


@pytest.mark.parametrize("way", WAYS)
def test_a_watched_file_that_changes_is_read_again(way: str, tmp_path: Path) -> None:
    file, write = tmp_path / "layerzero.yaml", WAYS[way]
    write(file, text(COMPOSED))
    lz.load_config(file)
    assert chosen() == COMPOSED
    with listening() as heard:
        for kernel in (REFERENCE, PLAIN, COMPOSED, REFERENCE):
            write(file, text(kernel))
            record = wait_for(heard, "reload_succeeded")
            assert chosen() == kernel
            assert str(file) in record.layerzero["sources"] and record.levelno == logging.INFO
        # One that is refused leaves the last one in force, and the next good one is taken.
        write(file, "locks: [\n")
        assert "unclosed" in wait_for(heard, "reload_refused").layerzero["error"]
        assert chosen() == REFERENCE and not lz.health().well
        write(file, text(PLAIN))
        wait_for(heard, "reload_succeeded")
        assert chosen() == PLAIN and lz.health().well


def test_a_file_that_is_removed_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(text(COMPOSED))
    lz.load_config(file)
    with listening() as heard:
        file.unlink()
        wait_for(heard, "reload_refused")
        assert chosen() == COMPOSED
        file.write_text(text(REFERENCE))
        wait_for(heard, "reload_succeeded")
        assert chosen() == REFERENCE


def test_what_a_watched_file_includes_is_watched_too(tmp_path: Path) -> None:
    file, more, later = tmp_path / "layerzero.yaml", tmp_path / "more.yaml", tmp_path / "later.yaml"
    more.write_text(f"locks:\n  rms_norm: {COMPOSED}\n")
    file.write_text("watch: true\nwatch_debounce_ms: 5\ninclude: [more.yaml]\n")
    lz.load_config(file)
    with listening() as heard:
        renamed_over(more, f"locks:\n  rms_norm: {REFERENCE}\n")
        wait_for(heard, "reload_succeeded")
        assert chosen() == REFERENCE
        # One that was not there when the watching began.
        later.write_text(f"locks:\n  rms_norm: {PLAIN}\n")
        renamed_over(file, "watch: true\nwatch_debounce_ms: 5\ninclude: [later.yaml]\n")
        wait_for(heard, "reload_succeeded")
        assert chosen() == PLAIN
        renamed_over(later, f"locks:\n  rms_norm: {COMPOSED}\n")
        # A change of what is watched is followed by one more reload, so that nothing is missed in between.
        while chosen() != COMPOSED:
            wait_for(heard, "reload_succeeded")


def test_a_file_that_says_so_is_no_longer_watched(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(text(COMPOSED))
    lz.load_config(file)
    with listening() as heard:
        renamed_over(file, text(REFERENCE).replace("watch: true", "watch: false"))
        wait_for(heard, "reload_succeeded")
        assert said("watch").value is False
        renamed_over(file, text(PLAIN).replace("watch: true", "watch: false"))
        with pytest.raises(queue.Empty):
            heard.get(timeout=1.0)
        assert chosen() == REFERENCE


# --- a process of its own ---------------------------------------------------------------------------------------------

START = """
    import sys
    sys.path.insert(0, {tests!r})
    import warnings
    import torch
    import layerzero as lz
    x = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
"""


def process(code: str, **variables: str) -> Any:
    """What a fresh process with these variables answers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return answer(START.format(tests=os.path.dirname(__file__)) + code)


def test_sighup_reloads_once_a_file_was_loaded(tmp_path: Path) -> None:
    found = process(
        f"""
    import os, signal
    from pathlib import Path
    from test_control_config import listening, wait_for
    file = Path({str(tmp_path)!r}) / "layerzero.yaml"
    file.write_text("locks: {{rms_norm: {COMPOSED}}}\\n")
    lz.load_config(file)
    said = [lz.which("rms_norm", x)["kernel_id"]]
    with listening() as heard:
        file.write_text("locks: {{rms_norm: {REFERENCE}}}\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        said.append(wait_for(heard, "reload_succeeded").event)
        said.append(lz.which("rms_norm", x)["kernel_id"])
        file.write_text("lokcs: 1\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        said.append(wait_for(heard, "reload_refused").event)
        said.append(lz.which("rms_norm", x)["kernel_id"])
    answer([said, lz.health().reloads["refused"]])
    """
    )
    assert found == [[COMPOSED, "reload_succeeded", REFERENCE, "reload_refused", REFERENCE], 1]


def test_sighup_reloads_a_file_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator does not touch the code: the signal must not end the process."""
    (tmp_path / "layerzero.yaml").write_text(f"locks: {{rms_norm: {COMPOSED}}}\n")
    monkeypatch.chdir(tmp_path)
    found = process(
        f"""
    import os, signal
    from pathlib import Path
    from test_control_config import listening, wait_for
    said = [lz.which("rms_norm", x)["kernel_id"]]
    with listening() as heard:
        Path("layerzero.yaml").write_text("locks: {{rms_norm: {REFERENCE}}}\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(heard, "reload_succeeded")
    answer([*said, lz.which("rms_norm", x)["kernel_id"]])
    """
    )
    assert found == [COMPOSED, REFERENCE]


def test_a_program_that_uses_sighup_itself_keeps_it() -> None:
    found = process(
        """
    import os, signal, threading
    seen = []
    signal.signal(signal.SIGHUP, lambda *_: seen.append(1))
    lz.configure(checked=True)
    os.kill(os.getpid(), signal.SIGHUP)
    # A thread is no place to set a handler from; the main thread does it later.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    thread = threading.Thread(target=lz.configure)
    thread.start(); thread.join()
    lz.configure(checked=False)
    answer([seen, signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL])
    """
    )
    assert found == [[1], True]


def test_a_broken_file_at_the_start_is_the_first_calls_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layerzero.yaml").write_text("fallback_enabeld: true\n")
    monkeypatch.chdir(tmp_path)
    found = process(
        f"""
    from pathlib import Path
    said = []
    for ask in (lambda: lz.rms_norm(x), lambda: lz.which("rms_norm", x), lambda: lz.settings(), lambda: lz.rms_norm(x)):
        try:
            ask()
            said.append("served")
        except lz.ConfigurationError as error:
            said.append(str(error))
    Path("layerzero.yaml").write_text("locks: {{rms_norm: {COMPOSED}}}\\n")
    lz.rms_norm(x)
    answer([said, lz.which("rms_norm", x)["kernel_id"]])
    """
    )
    assert all("layerzero.yaml:1:1: fallback_enabeld: unknown key" in text for text in found[0]), found
    assert found[1] == COMPOSED
    done = python("-c", "import layerzero; print('imported')")
    assert done.returncode == 0 and "imported" in done.stdout


SEEN = """
    q = torch.randn(1, 20, 2, 16)
    import logging, io
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("layerzero").addHandler(handler)
    logging.getLogger("layerzero").setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lz.rms_norm(x)
    answer({
        "rms_norm": lz.which("rms_norm", x)["kernel_id"],
        "attention": lz.which("attention", q, q, q)["kernel_id"],
        "settings": {s.key: s.value for s in lz.settings() if s.origin["layer"] == "environment"},
        "names": {s.key: s.origin["name"] for s in lz.settings() if s.origin["layer"] == "environment"},
        "logged": stream.getvalue(),
        "health": str(lz.health()),
        "told": [str(w.message) for w in told],
    })
"""


def test_the_environment_decides() -> None:
    found = process(
        SEEN,
        LAYERZERO_PREFER="lz_cpu, nobody",
        LAYERZERO_AVOID="torch",
        LAYERZERO_LOCK_ATTENTION="torch.attention.unfused",
        LAYERZERO_DETERMINISTIC="yes",
        LAYERZERO_VERBOSE="1",
        LAYERZERO_BREAKER_TIMEOUT_MS="77",
        LAYERZERO_CACHE_MAX_SIZE="",
        LAYERZERO_PREFFER="flashinfer",
        LAYERZERO_LOCK_ATTENTIONN="x",
    )
    assert found["rms_norm"] == REFERENCE, "20 points for it, 50 against torch's"
    assert found["attention"] == "torch.attention.unfused"
    assert found["settings"] == {
        "deterministic": True,
        "verbose": True,
        "prefer_sources": ["lz_cpu", "nobody"],
        "avoid_sources": ["torch"],
        "breaker.timeout_ms": 77,
        "locks.attention": "torch.attention.unfused",
    }
    assert found["names"]["avoid_sources"] == "LAYERZERO_AVOID"
    assert f"{REFERENCE} serves" in found["logged"]
    # Names that mean nothing are warned of, with what was probably meant.
    for name, nearest in (("PREFFER", "PREFER"), ("LOCK_ATTENTIONN", "LOCK_ATTENTION")):
        warning = f"LAYERZERO_{name} means nothing; did you mean 'LAYERZERO_{nearest}'?"
        assert warning in found["health"]
        assert any(warning in text for text in [*found["told"], found["logged"]]), "said at the first call as well"


def test_the_environment_turns_everything_off() -> None:
    found = process(SEEN, LAYERZERO_DISABLED="1", LAYERZERO_LOG_SELECTIONS="1")
    assert found["rms_norm"] == REFERENCE and found["attention"].startswith("lz_cpu.ref.")
    assert found["settings"] == {"enabled": False, "log_selections": True}


def test_a_wrong_variable_is_the_first_calls_error() -> None:
    found = process(
        """
    try:
        lz.rms_norm(x)
        answer("served")
    except lz.ConfigurationError as error:
        answer(str(error))
    """,
        LAYERZERO_DISABLED="perhaps",
        LAYERZERO_BREAKER_TIMEOUT_MS="0",
        LAYERZERO_LOCK_ATTENTION="",
    )
    assert "environment variable LAYERZERO_DISABLED" in found and '"perhaps"' in found
    assert "environment variable LAYERZERO_BREAKER_TIMEOUT_MS" in found


def test_the_variable_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"locks: {{rms_norm: {COMPOSED}}}\n")
    found = process(
        """
    origin = {s.key: s.origin for s in lz.settings()}["locks.norm.rms"]
    answer([lz.which("rms_norm", x)["kernel_id"], origin["path"]])
    """,
        LAYERZERO_CONFIG=str(tmp_path / "mine.yaml"),
    )
    assert found == [COMPOSED, str(tmp_path / "mine.yaml")]


def test_the_users_file_stands_below_the_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "layerzero").mkdir(parents=True)
    users = tmp_path / "home" / "layerzero" / "layerzero.yaml"
    names = [users, tmp_path / "home" / "layerzero" / "config.yaml"]
    for name in names:
        name.write_text("memory_headroom_mb: 1\ncache: {max_size: 11}\n")
    (tmp_path / "layerzero.yaml").write_text("memory_headroom_mb: 2\n")
    monkeypatch.chdir(tmp_path)
    found = process(
        "\n    answer({s.key: [s.value, s.origin['layer']] for s in lz.settings() if s.origin['layer'] != 'default'})",
        XDG_CONFIG_HOME=str(tmp_path / "home"),
    )
    assert found == {"memory_headroom_mb": [2, "project_file"], "cache.max_size": [11, "user_file"]}
