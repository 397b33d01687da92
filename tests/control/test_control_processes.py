"""Configuration of a process of its own: the files and the environment it starts with, and the signal to read them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_force import COMPOSED, REFERENCE
from processes import SUPPORT, forked, python

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
        patch.delenv("LAYERZERO_VERIFY")
        patch.delenv("LAYERZERO_PERFDB_PRIORS")
        for name, value in variables.items():
            patch.setenv(name, value)
        return forked(START.format(tests=str(SUPPORT)) + code)


def test_sighup_reloads_once_a_file_was_loaded(tmp_path: Path) -> None:
    found = process(
        f"""
    import os, signal
    from pathlib import Path
    from listening import listening, wait_for
    file = Path({str(tmp_path)!r}) / "layerzero.yaml"
    file.write_text("locks: {{rms_norm: {COMPOSED}}}\\n")
    lz.load_config(file)
    said = [lz.which("rms_norm", x).kernel_id]
    with listening() as heard:
        file.write_text("locks: {{rms_norm: {REFERENCE}}}\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        said.append(wait_for(heard, "reload_succeeded").event)
        said.append(lz.which("rms_norm", x).kernel_id)
        file.write_text("lokcs: 1\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        said.append(wait_for(heard, "reload_refused").event)
        said.append(lz.which("rms_norm", x).kernel_id)
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
    from listening import listening, wait_for
    said = [lz.which("rms_norm", x).kernel_id]
    with listening() as heard:
        Path("layerzero.yaml").write_text("locks: {{rms_norm: {REFERENCE}}}\\n")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(heard, "reload_succeeded")
    answer([*said, lz.which("rms_norm", x).kernel_id])
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
    answer([said, lz.which("rms_norm", x).kernel_id])
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
        "rms_norm": lz.which("rms_norm", x).kernel_id,
        "attention": lz.which("attention", q, q, q).kernel_id,
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
        LAYERZERO_PREFER="lz_cpu, flashinfer",
        LAYERZERO_AVOID="torch",
        LAYERZERO_LOCK_ATTENTION="torch.attention.unfused",
        LAYERZERO_DETERMINISTIC="yes",
        LAYERZERO_VERBOSE="1",
        LAYERZERO_BREAKER_TIMEOUT_MS="77",
        LAYERZERO_CACHE_MAX_SIZE="",
        LAYERZERO_PREFFER="flashinfer",
        LAYERZERO_LOCK_ATTENTIONN="x",
    )
    assert found["rms_norm"].startswith("lz_cpu.rms_norm"), "20 points for it, 50 against torch's"
    assert found["attention"] == "torch.attention.unfused"
    assert found["settings"] == {
        "deterministic": True,
        "verbose": True,
        "prefer_sources": ["lz_cpu", "flashinfer"],
        "avoid_sources": ["torch"],
        "breaker.timeout_ms": 77,
        "locks.attention": "torch.attention.unfused",
    }
    assert found["names"]["avoid_sources"] == "LAYERZERO_AVOID"
    assert f"{found['rms_norm']} serves" in found["logged"]
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
    answer([lz.which("rms_norm", x).kernel_id, origin["path"]])
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


_FAILING = """
import torch, layerzero as lz
lz.configure(verify="off", degradation__enabled=False, breaker__timeout_ms=600_000)
runs = []
@lz.register_kernel(operation="norm.rms", kernel_id="t.flaky", platform="cpu", supported_dtypes=["float32"], priority=99)
def kernel(input, eps):
    runs.append(1)
    raise RuntimeError("no luck")
x = torch.randn(4, 8)
for _ in range(10):
    lz.rms_norm(x)
(circuit,) = [b for b in lz.health().breakers if b["kernel"] == "t.flaky"]
answer([len(runs), circuit["state"], circuit["last_error"]["message"]])
"""


def test_failure_signatures_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (runs, state, error) = forked(_FAILING)
    assert (runs, state) == (5, "open") and "no luck" in error
    (runs, state, error) = forked(_FAILING)
    assert (runs, state) == (0, "open") and "no luck" in error, "it was not even tried"
    # Elsewhere nothing is known of it.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert forked(_FAILING)[0] == 5
