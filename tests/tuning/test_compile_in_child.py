"""Kernels of installed plugins, compiled by a child: penalised until it reports, and a program's end is nobody's wait."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from processes import PACKAGE, forked

if sys.platform != "linux":
    pytest.skip("processes are waited for by pidfd", allow_module_level=True)

#: A plugin with a kernel that is compiled on first use: a folder in Triton's cache is what it keeps, and a file beside
#: it says which process compiled what. What else a compiler does for a size is said by files of that size's name.
PLUGIN = """
    import os, pathlib, signal
    import torch.nn.functional as F

    place = pathlib.Path(os.environ["TRITON_CACHE_DIR"])

    def kernel(input, weight=None, eps=1e-6):
        size = input.shape[-1]
        kept = place / str(size)
        if not kept.exists():
            with open(place.parent / "compiled", "a") as told:
                told.write(f"{size} {os.getpid()} {os.getppid()}\\n")
            if size == 48:
                os._exit(1)
            if size == 56:
                (place.parent / "begun").write_text("")
                signal.pause()
            kept.mkdir(parents=True)
        return F.rms_norm(input, (size,), weight, eps)

    def register():
        import layerzero as lz
        document = {"schema_version": "1.0", "backend": "keeps", "backend_version": "1", "platform": "cpu", "ops":
            {"norm.rms": [{"kernel_id": "keeps.rms", "dtypes": ["float32"], "requires_layouts": ["contiguous"],
                           "priority": 99, "jit": True, "inputs": {"weight": {}}}]}}
        lz.register_backend(document, {"keeps.rms": kernel}, trusted=True)
"""
PROGRAM = """
    import json, os, time
    import torch, layerzero as lz
    def serves(size): return lz.which("rms_norm", torch.ones(2, size)).kernel_id == "keeps.rms"
    def settle():
        deadline = time.monotonic() + 240
        while True:
            # One thread does both, so that this waits for what is under way.
            assert lz.warmup(calls=[], timeout=240).wait(0)
            told = lz.health().to_dict()["jit"]
            if not told["queued"] and not told["running"]: return told
            assert time.monotonic() < deadline, told
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with the plugin installed, and a cache with nothing in it."""
    (tmp_path / "keeping.py").write_text(textwrap.dedent(PLUGIN))
    metadata = tmp_path / "keeps-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: keeps\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[layerzero.backends]\nkeeps = keeping:register\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LAYERZERO_VERIFY", "off")
    return tmp_path


def compiled(folder: Path) -> list[list[int]]:
    """Size, process and parent process of what was compiled."""
    return [[int(number) for number in line.split()] for line in (folder / "compiled").read_text().splitlines()]


def ended(pid: int) -> bool:
    """Whether a process is over, or is so soon."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    end = select.poll()
    end.register(descriptor, select.POLLIN)
    over = bool(end.poll(60_000))
    os.close(descriptor)
    return over


def test_a_kernel_serves_once_the_child_has_compiled_it(folder: Path) -> None:
    """And the next process has it at once."""
    told: dict[str, Any] = forked(
        PROGRAM
        + """
    x = torch.randn(2, 40)
    first = lz.rms_norm(x)
    before = serves(40)
    settled = settle()
    assert torch.allclose(first, lz.rms_norm(x), atol=1e-5)
    answer(dict(pid=os.getpid(), before=before, after=serves(40), settled=settled))
    """,
        path=[folder],
    )
    assert (told["before"], told["after"]) == (False, True)
    by = told["settled"]["compiler"]
    assert (by["by"], by["compiled"], by["lost"], by["why"]) == ("child", 1, 0, None)
    [[size, pid, parent]] = compiled(folder)
    assert (size, parent) == (40, told["pid"]) and pid != parent
    assert ended(pid)
    again = forked(PROGRAM + "    lz.rms_norm(torch.ones(2, 40))\n    answer([serves(40), settle()])", path=[folder])
    assert again[0] is True and again[1]["restored"] == 1 and again[1]["compiler"]["by"] == "nobody"


@pytest.mark.slow
def test_a_kernel_that_children_die_over_is_given_up(folder: Path) -> None:
    """It is never tried in the program itself, and another kernel serves."""
    told: dict[str, Any] = forked(
        PROGRAM
        + """
    lz.rms_norm(torch.ones(2, 48))
    broken = settle()
    doctor = str(lz.doctor(file=open(os.devnull, "w")).compiler)
    answer(dict(pid=os.getpid(), broken=broken, doctor=doctor, serves=serves(48), text=str(lz.health())))
    """,
        path=[folder],
    )
    assert [size for size, *_ in compiled(folder)] == [48, 48, 48] and not told["serves"]
    assert all(parent == told["pid"] and pid != parent for _, pid, parent in compiled(folder))
    [failed] = told["broken"]["failed"]
    assert failed["kernel"] == "keeps.rms" and "ended with exit code 1 while compiling keeps.rms" in failed["error"]
    assert told["broken"]["compiler"]["lost"] == 3
    assert "exit code 1" in told["doctor"] and "exit code 1" in told["text"]
    assert all(ended(pid) for _, pid, _ in compiled(folder))


def test_a_program_ends_at_once_while_a_child_compiles(folder: Path) -> None:
    code = (
        PROGRAM
        + """
    import sys
    lz.rms_norm(torch.ones(2, 56))
    while not os.path.exists(os.path.join(os.environ["HOME"], "begun")): time.sleep(0.01)
    print("over", flush=True)
    sys.exit(5)
    """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(folder)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        input="what the user types\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "over\n", "")
    [[_, pid, _]] = compiled(folder)
    assert ended(pid)


def test_where_no_child_can_be_started_a_thread_compiles(folder: Path) -> None:
    """So it does for kernels that only this program has."""
    told = forked(
        PROGRAM
        + """
    import sys
    import torch.nn.functional as F
    threads = []
    @lz.register_kernel(operation="norm.layer", kernel_id="own.layer", platform="cpu", supported_dtypes=["float32"],
                        priority=99, jit=True)
    def own(input, weight=None, bias=None, eps=1e-5):
        import threading
        threads.append([threading.current_thread().name, os.getpid()])
        return F.layer_norm(input, input.shape[-1:], weight, bias, eps)
    lz.layer_norm(torch.ones(2, 40), (40,))
    own_only = settle()["compiler"]["by"]
    executable, sys.executable = sys.executable, "/usr/bin/uwsgi"
    lz.rms_norm(torch.ones(2, 40))
    told = settle()
    answer([os.getpid(), own_only, threads, told["compiler"], serves(40), str(lz.health())])
    """,
        path=[folder],
    )
    pid, own_only, threads, compiler, serves, text = told
    assert own_only == "nobody" and threads[0] == ["layerzero-compile", pid]
    assert compiler["by"] == "thread" and "/usr/bin/uwsgi" in compiler["why"] and "/usr/bin/uwsgi" in text
    assert serves and [[size, process] for size, process, _ in compiled(folder)] == [[40, pid]]
    json.dumps(compiler)
