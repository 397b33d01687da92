"""Files that are not LayerZero's stay as they are; files that are written are written whole, and through what is no file."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from processes import forked

X = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [4, 64]}}}


def everything(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every entry below a folder: what it is, its inode, its size and what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 30:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path)] = (status.st_mode, status.st_ino, status.st_size, content)
    return found


# --- what perfdb.path may point at ------------------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _others(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.commit()
    connection.close()


def _others_damaged(path: Path) -> None:
    _others(path)
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xff" * 300
    path.write_bytes(content)


def _secret(path: Path) -> None:
    path.write_text("secret")
    path.chmod(0)


KINDS: dict[str, Callable[[Path], object]] = {
    "directory": lambda path: path.mkdir(),
    "pipe": _fifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/full"),
    "loop": lambda path: path.symlink_to(path.name),
    "text": lambda path: path.write_text("ssh-ed25519 AAAA somebody\n"),
    "no permission": _secret,
    "huge": _sparse,
    "another program's database": _others,
    "another program's damaged database": _others_damaged,
}


@pytest.fixture
def unmeasured(tmp_path: Path) -> Iterator[None]:
    """No database, before and after."""
    yield
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    _native.learn()
    lz.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("unmeasured")
def test_no_file_that_is_not_ours_changes(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    KINDS[kind](path)
    before = everything(folder)
    lz.configure(perfdb={"path": str(path)})
    _native.learn()
    x = torch.randn(4, 64)
    assert torch.allclose(lz.rms_norm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-5)
    assert len(lz.tune(calls=[X], budget="2s").tuned) == 1
    _native.learn()
    assert everything(folder) == before
    state = lz.health().perfdb
    assert state["durable"] is False and len(state["notes"]) == 1 and str(path) in state["notes"][0], "it is said once"


# --- what a checkout may say ------------------------------------------------------------------------------------------

CALL = """
    import warnings
    import torch
    import layerzero as lz
    said = []
    for _ in range(2):
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = lz.rms_norm(torch.zeros(1, 2)).tolist()
            said.append([result, lz.health().perfdb["durable"], [str(warning.message) for warning in told]])
        except lz.ConfigurationError as error:
            said.append(str(error))
    answer(said)
"""


def test_a_hostile_checkout_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, checkout = tmp_path / "home", tmp_path / "checkout"
    keys = home / ".ssh" / "authorized_keys"
    keys.parent.mkdir(parents=True)
    checkout.mkdir()
    keys.write_text("ssh-ed25519 AAAA me\n")
    (checkout / "layerzero.yaml").write_text("perfdb: {path: ~/.ssh/authorized_keys}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(checkout)
    before = everything(tmp_path)
    first, second = forked(CALL)
    assert first == second and everything(tmp_path) == before
    for part in ("checkout/layerzero.yaml:1:10", "perfdb.path", ".ssh/authorized_keys", "allow_project_paths"):
        assert part in first
    # Named by the user, the path is used, and the file is still left alone.
    monkeypatch.setenv("LAYERZERO_PERFDB_PATH", str(keys))
    first, second = forked(CALL)
    assert first[:2] == [[[0.0, 0.0]], False] and second == [[[0.0, 0.0]], False, []]
    (warning,) = first[2]
    assert f"'{keys}' is no LayerZero database" in warning and "set perfdb.path" in warning and "AAAA" not in warning
    assert everything(keys.parent) == {k: v for k, v in before.items() if k.startswith(str(keys))}
    # A path of the checkout's own is as good as any.
    monkeypatch.delenv("LAYERZERO_PERFDB_PATH")
    (checkout / "layerzero.yaml").write_text("perfdb: {path: .perfdb.sqlite}\n")
    (checkout / ".perfdb.sqlite").touch()
    assert forked(CALL) == [[[[0.0, 0.0]], True, []]] * 2
    assert (checkout / ".perfdb.sqlite").read_bytes().startswith(b"SQLite format 3")


# --- files that are written -------------------------------------------------------------------------------------------


def command(*arguments: str | Path) -> int:
    return _native.cli(["layerzero", *map(str, arguments)])


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(X) + "\n")
    return path


@pytest.fixture
def measured(tmp_path: Path, unmeasured: None) -> Path:
    """A database with a measurement."""
    path = tmp_path / "perfdb.sqlite"
    lz.configure(perfdb={"path": str(path)})
    assert len(lz.tune(calls=[X], budget="2s").tuned) == 1
    return path


@pytest.fixture
def writers(calls: Path, measured: Path) -> dict[str, Callable[[Path], object]]:
    """Everything that writes a file somebody names."""
    return {
        "text": lambda path: _native.write_file(path, "text"),
        "lockfile": lambda path: lz.write_lockfile(path, [X]),
        "export": lambda path: command("perfdb", "--db", measured, "export", "-o", path),
        "lock": lambda path: command("lock", "--calls", calls, "-o", path),
        "report": lambda path: command("report", "--db", measured, "-o", path),
    }


def test_what_is_written_goes_through_links_and_pipes_and_devices(
    writers: dict[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    for name, write in writers.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "plain")
        plain = (folder / "plain").read_bytes()
        assert plain
        # A link stays one, and what it leads to is written; also where there is nothing yet.
        for target in ("there", "not yet"):
            link = folder / f"link to {target}"
            if target == "there":
                (folder / target).write_text("before")
                (folder / target).chmod(0o640)
            link.symlink_to(target)
            write(link)
            written = (folder / target).read_bytes()
            assert link.is_symlink() and written != b"before" and len(written) >= 4, (name, target)
        assert stat.S_IMODE((folder / "there").stat().st_mode) == 0o640, name
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda pipe=pipe, read=read: read.append(pipe.read_bytes()))
        reader.start()
        write(pipe)
        reader.join(60)
        assert stat.S_ISFIFO(pipe.lstat().st_mode) and len(read[0]) > 3, name
        device = folder / "device"
        device.symlink_to("/dev/null")
        write(device)
        assert device.is_symlink() and stat.S_ISCHR(device.stat().st_mode), name
        names = {"plain", "there", "not yet", "link to there", "link to not yet", "pipe", "device"}
        assert {path.name for path in folder.iterdir()} == names, "nothing unfinished is left"


def test_what_cannot_be_written_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    _socket(tmp_path / "socket")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "full").symlink_to("/dev/full")
    before = everything(tmp_path)
    for name in ("folder", "socket", "loop", "full", "none/file"):
        with pytest.raises(OSError, match=r"\w"):
            _native.write_file(tmp_path / name, "text" * 5000)
        assert everything(tmp_path) == before, name


def test_a_name_that_waits_for_us_is_not_taken(tmp_path: Path) -> None:
    """Temporary files are made exclusively, under names nobody can foresee."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (f"file.{os.getpid()}.tmp", f"file.{os.getpid()}.unfinished", "file.tmp", ".file.tmp", "file.json.tmp"):
        (folder / name).symlink_to(victim)
    seen: set[str] = set()
    for _ in range(20):
        _native.write_file(folder / "file", "text")
        seen |= {path.name for path in folder.iterdir()}
    assert (folder / "file").read_text() == "text" and victim.read_text() == "mine" and len(seen) == 6
