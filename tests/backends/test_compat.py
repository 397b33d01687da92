"""`layerzero compat`: libraries that die, hang, lie or do not get on, and what is done about them when they are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compat_places import PACKAGE, Place
from layerzero.compat import command, matrix
from layerzero.compat.processes import Outcome
from layerzero.errors import LayerZeroWarning

#: What the library does when it is imported, and the kernels of its adapter.
LIBRARIES = {
    "works": ("", {"gelu": "return F.gelu(input, approximate=approximate)"}),
    "partly": (
        "",
        {
            "gelu": "return F.gelu(input, approximate=approximate)",
            "twice": "return F.gelu(input, approximate=approximate) * 2",
            "raises": "raise RuntimeError('no such\\narchitecture')",
        },
    ),
    "wrong": ("", {"gelu": "return input + 1"}),
    "aborts": ("import os; os.write(2, b'terminate called: bad symbol\\n'); os.abort()", {"gelu": "return input"}),
    "dies": ("", {"gelu": "import os; os.kill(os.getpid(), 11)", "other": "return input"}),
    "hangs": ("import threading; threading.Event().wait()", {"gelu": "return input"}),
    "raises": ("raise RuntimeError('built for another\\nworld')", {"gelu": "return input"}),
    "leaves": ("import os; os._exit(3)", {"gelu": "return input"}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Every kind of library, examined."""
    made = Place(tmp_path_factory.mktemp("compat"), tuple(LIBRARIES))
    for name, (imports, kernels) in LIBRARIES.items():
        made.add(name, imports, kernels)
    return made


@pytest.fixture(scope="module")
def examined(place: Place) -> tuple[int, str, dict[str, Any]]:
    """The exit code, what was printed, and the file."""
    done = place.python("-m", "layerzero", "compat", "--timeout", "2")
    return done.returncode, done.stdout + done.stderr, json.loads(place.file.read_text())


def entry_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    (entry,) = (entry for entry in document["entries"] if entry["backend"] == name)
    return dict(entry)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("works", "ok", None),
        ("partly", "ok", "not right: partly.twice, partly.raises"),
        ("wrong", "incompatible", "none of its kernels is right: wrong.gelu: differs from the right result by up to"),
        ("aborts", "incompatible", "was killed by SIGABRT while importing aborts: terminate called: bad symbol"),
        ("dies", "incompatible", "was killed by SIGSEGV while running dies.gelu"),
        ("hangs", "incompatible", "was not done with importing hangs after 2 s"),
        ("raises", "unavailable", "raises cannot be imported: RuntimeError: built for another"),
        ("leaves", "incompatible", "ended with exit code 3 while importing leaves"),
    ],
)
def test_what_becomes_of_a_library(
    examined: tuple[int, str, dict[str, Any]], name: str, status: str, reason: str | None
) -> None:
    entry = entry_of(examined[2], name)
    assert entry["status"] == status
    assert entry["reason"] is None if reason is None else entry["reason"].startswith(reason)
    assert entry["versions"]["library"] == "1.0" and entry["versions"]["torch"] and entry["versions"]["python"]
    (line,) = (line for line in examined[1].splitlines() if line.startswith(name + " "))
    assert status in line and (reason or "") in line


def test_kernels_are_told_apart(examined: tuple[int, str, dict[str, Any]]) -> None:
    kernels = {name: kernel for entry in examined[2]["entries"] for name, kernel in entry["kernels"].items()}
    assert {name: kernel["status"] for name, kernel in kernels.items()} == {
        "works.gelu": "right",
        "partly.gelu": "right",
        "partly.twice": "wrong",
        "partly.raises": "failed",
        "wrong.gelu": "wrong",
        "aborts.gelu": "not tried",
        "dies.gelu": "failed",
        "dies.other": "not tried",
        "hangs.gelu": "not tried",
        "raises.gelu": "not tried",
        "leaves.gelu": "not tried",
    }
    assert kernels["partly.raises"]["why"] == "RuntimeError: no such"
    assert "wrong: partly.twice: differs from the right result" in examined[1]


def test_something_wrong_is_an_exit_code(examined: tuple[int, str, dict[str, Any]]) -> None:
    code, printed, document = examined
    assert code == 1 and document["schema_version"] == matrix.SCHEMA_VERSION
    assert "beside each other, in both orders: as alone" in printed
    orders = [pair["backends"] for pair in document["pairs"]]
    assert sorted(orders) == [["partly", "works"], ["works", "partly"]]


def test_what_would_kill_the_process_is_not_imported(place: Place, examined: tuple[int, str, dict[str, Any]]) -> None:
    found = place.answer("""
        import io, layerzero as lz
        backends = lz.doctor(file=io.StringIO()).backends
        print(json.dumps({b["name"]: b["unavailable"] and (b["unavailable"]["code"], b["unavailable"]["message"])
                          for b in backends}))
    """)
    assert found["works"] is None and found["partly"] is None
    for name in ("aborts", "dies", "hangs", "leaves", "wrong"):
        code, message = found[name]
        assert code == "BACKEND_IMPORT_FAILED" and entry_of(examined[2], name)["reason"] in message, message
        assert "found by 'layerzero compat' on 2" in message


def test_other_versions_are_not_known(place: Place, examined: tuple[int, str, dict[str, Any]]) -> None:
    asked = "from layerzero.compat import problem; print(json.dumps([*map(problem, ('aborts', 'hangs', 'dies'))]))"
    assert all(place.answer(asked))
    site = place.folder / "site"
    record = site / "lib_aborts-1.0.dist-info" / "RECORD"
    adapter = site / "layerzero" / "backends" / "hangs" / "adapter.py"
    inside = site / "layerzero" / "backends" / "dies" / "pieces" / "kernels.py"
    kept = record.read_text(), adapter.read_text()
    try:
        # The same version, built anew; an adapter that was mended; and one that was in a folder of its own.
        record.write_text("lib_aborts.py,sha256=def,1\n")
        adapter.write_text(kept[1] + "\n# mended\n")
        inside.parent.mkdir()
        inside.write_text("# mended\n")
        assert place.answer(asked) == [None, None, None]
    finally:
        record.write_text(kept[0])
        adapter.write_text(kept[1])
        inside.unlink(missing_ok=True)
    assert all(place.answer(asked))


def test_libraries_that_do_not_get_on(tmp_path: Path) -> None:
    place = Place(tmp_path, ("first", "second"))
    kernels = {"gelu": "return F.gelu(input, approximate=approximate)"}
    place.add("first", "", kernels)
    place.add("second", "import os, sys\nif 'lib_first' in sys.modules: os.abort()", kernels)
    file = tmp_path / "matrix.json"
    done = place.python("-m", "layerzero", "compat", "--json", "--timeout", "60", "--output", str(file))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(file.read_text()) == found and not place.file.exists()
    assert [(pair["backends"], pair["status"]) for pair in found["pairs"]] == [
        (["first", "second"], "conflict"),
        (["second", "first"], "ok"),
    ]
    entry = entry_of(found, "second")
    assert entry["status"] == "incompatible" and entry_of(found, "first")["status"] == "ok"
    assert entry["reason"] == "beside first: was killed by SIGABRT while importing second"
    # It counts as long as the other is there in that version.
    place.file.parent.mkdir(parents=True)
    place.file.write_text(file.read_text())
    asked = "from layerzero.compat import problem; print(json.dumps([problem('first'), problem('second')]))"
    assert [bool(why) for why in place.answer(asked)] == [False, True]
    (tmp_path / "site" / "lib_first-1.0.dist-info").rename(tmp_path / "site" / "lib_first-1.1.dist-info")
    (tmp_path / "site" / "lib_first-1.1.dist-info" / "METADATA").write_text("Name: lib_first\nVersion: 1.1\n")
    assert place.answer(asked) == [None, None]


# --- without processes ------------------------------------------------------------------------------------------------


def entry(name: str, status: str = "ok", **fields: Any) -> dict[str, Any]:
    kernel = {"status": "right", "why": None, "call": {"call": {"op": "activation.gelu"}}}
    found = {"version": "1.0"}
    return {
        "backend": name,
        "versions": {"library": "1.0"},
        "status": status,
        "reason": None,
        "found": found,
        "kernels": {f"{name}.gelu": kernel},
        "made": "2026-01-01T00:00:00+00:00",
        **fields,
    }


def run_together(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], enemies: set[tuple[str, str]]) -> Any:
    """Processes in which the second of two enemies dies when it comes after the first."""
    runs = []

    def probe(order: Sequence[str], calls: Any, timeout: float) -> Outcome:
        runs.append(list(order))
        for i, second in enumerate(order):
            if any((first, second) in enemies for first in order[:i]):
                return Outcome(died=f"was killed while importing {second}")
        return Outcome(imported={name: {"unavailable": None} for name in order})

    monkeypatch.setattr(command, "probe", probe)
    monkeypatch.setattr(matrix, "versions", lambda name: {"library": f"{name} 1.0"})
    entries = {name: entry(name) for name in names}
    return command.together(names, entries, 1.0, lambda _: None), entries, runs


def test_all_at_once_says_it_of_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, entries, runs = run_together(monkeypatch, ["a", "b", "c"], set())
    assert runs == [["a", "b", "c"], ["c", "b", "a"]]
    assert len(pairs) == 6 and all(pair["status"] == "ok" for pair in pairs)
    assert all(entry["status"] == "ok" for entry in entries.values())


def test_where_that_fails_every_pair_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, entries, runs = run_together(monkeypatch, ["a", "b", "c"], {("a", "c"), ("c", "b")})
    assert len(runs) == 8
    assert [pair["backends"] for pair in pairs if pair["status"] == "conflict"] == [["a", "c"], ["c", "b"]]
    # Backends are loaded in their order: only what fails in that one counts.
    assert [entry["status"] for entry in entries.values()] == ["ok", "ok", "incompatible"]
    assert entries["c"]["beside"] == {"backend": "a", "versions": {"library": "a 1.0"}}


def test_a_matrix_of_one_backend_has_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_together(monkeypatch, ["a"], set())[0] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("\x00" * 10, "it is not JSON"),
        ("[]", "its schema_version is None, not 1"),
        ('{"schema_version": 99, "entries": []}', "its schema_version is 99, not 1"),
        ('{"schema_version": 1, "entries": [1], "pairs": []}', "its entries are not those of a matrix"),
        ('{"schema_version": 1, "entries": [{"backend": "torch"}], "pairs": []}', "its entries are not those"),
    ],
)
def test_a_damaged_file_is_passed_over_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matrix.path().parent.mkdir()
    matrix.path().write_text(text)
    matrix.forget()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert [matrix.problem(name) for name in ("torch", "onednn")] == [None, None]
        assert len(told) == 1 and told[0].category is LayerZeroWarning and why in str(told[0].message)
    finally:
        matrix.forget()


def test_no_file_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matrix, "versions", lambda _: pytest.fail("versions were read"))
    matrix.forget()
    assert matrix.problem("torch") is None
    # It is not looked for again.
    monkeypatch.setattr(matrix, "read", lambda _: pytest.fail("the file was read"))
    assert matrix.problem("onednn") is None
    matrix.forget()


def test_results_of_other_versions_stay_and_the_oldest_go() -> None:
    old = [entry("a", versions={"library": str(i)}, made=f"2026-01-{i + 1:02}T00:00:00+00:00") for i in range(12)]
    new = matrix.empty() | {"entries": [entry("a", versions={"library": "11"}, status="unavailable")]}
    kept = matrix.merged(matrix.empty() | {"entries": [*old, entry("b")]}, new)["entries"]
    assert [e["versions"]["library"] for e in kept if e["backend"] == "a"] == ["11", *map(str, range(10, 3, -1))]
    assert kept[0]["status"] == "unavailable" and len([e for e in kept if e["backend"] == "b"]) == 1


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "matrix.json"
    matrix.write(file, matrix.empty())
    with pytest.raises(TypeError):
        matrix.write(file, {"entries": [object()]})
    assert matrix.read(file) == matrix.empty() and list(file.parent.iterdir()) == [file]


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--backends", "nobody"]) == 2
    assert "there is no backend 'nobody'" in capsys.readouterr().err
    assert command.main(["--timeout", "0"]) == 2
    assert command.main(["--help"]) == 0


@pytest.mark.gpu
def test_what_comes_with_torch_is_right_on_the_gpu(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "XDG_CACHE_HOME": str(tmp_path)}
    arguments = ["-m", "layerzero", "compat", "--json", "--backends", "torch_cuda,triton"]
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for found in json.loads(done.stdout)["entries"]:
        states = [kernel["status"] for kernel in found["kernels"].values()]
        assert found["status"] == "ok" and states.count("right") > len(states) // 2, found
