"""Configuration: what is said where, what is refused and how, and files that are read again when that is asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from in_force import COMPOSED, PLAIN, REFERENCE, SAID_BY_THE_ENVIRONMENT, X, changed, chosen, said
from listening import PATIENCE, listening

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("restored"),
]


# --- code -------------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_key_a_value_and_an_origin() -> None:
    found = {setting.key: setting for setting in lz.settings() if setting.key not in SAID_BY_THE_ENVIRONMENT}
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
        ({"max_cpu_isa": "avx51"}, ["max_cpu_isa", "did you mean 'avx512'?"]),
        ({"backend_isolation": "subprocess"}, ["backend_isolation", "is not supported yet"]),
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
    lz.force_kernel("rms_norm", COMPOSED)
    assert chosen() == COMPOSED and changed() == {"locks.norm.rms": COMPOSED}
    report = lz.explain("rms_norm", X)
    assert report.basis == "locked" and f"lock norm.rms to {COMPOSED} (code)" in str(report)
    lz.force_kernel("norm.rms", REFERENCE)
    assert chosen() == REFERENCE
    lz.unforce_kernel("rms_norm")
    assert chosen() == PLAIN
    lz.force_kernel("rms_norm", COMPOSED)
    lz.reset()
    assert chosen() == PLAIN


def test_a_lock_on_a_kernel_that_cannot_serve_is_an_error_that_says_why() -> None:
    lz.force_kernel("rms_norm", "zentorch.rms_norm")
    for _ in range(3):
        with pytest.raises(lz.NoKernelFoundError) as caught:
            lz.rms_norm(X)
    codes = {r.code for r in caught.value.failures["zentorch.rms_norm"]}
    # It also needs instruction sets that not every CPU has.
    assert "NOT_INSTALLED" in codes and codes <= {"NOT_INSTALLED", "INSTRUCTION_SET_MISMATCH"}
    assert "POLICY_LOCKED" in {r.code for r in caught.value.failures[PLAIN]}
    lz.unforce_kernel("rms_norm")
    with pytest.raises(lz.ConfigurationError, match="no kernel is called 'nobody.at_all'"):
        lz.force_kernel("rms_norm", "nobody.at_all")
    assert chosen() == PLAIN and lz.which("gelu", X.double()).kernel_id == "torch.gelu"


def test_an_alias_is_locked_for_the_calls_it_is_about() -> None:
    q = torch.randn(1, 20, 2, 16)
    lz.force_kernel("attention.causal", "torch.attention.unfused")
    assert lz.which("attention", q, q, q).kernel_id == "torch.attention.unfused"
    assert lz.which("attention", q, q, q, causal=False).kernel_id != "torch.attention.unfused"


@pytest.mark.parametrize("name", ["rms_nrm", "norm", ""])
def test_a_lock_on_no_operation_is_refused(name: str) -> None:
    with pytest.raises(lz.ConfigurationError) as caught:
        lz.force_kernel(name, COMPOSED)
    assert name in str(caught.value)
    with pytest.raises(lz.ConfigurationError):
        lz.unforce_kernel(name)
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
        ({"deny_sources": ["torch"], "deny": "lz_cpu.rms_norm*"}, REFERENCE),
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
    lz.unforce_kernel("rms_norm")
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
