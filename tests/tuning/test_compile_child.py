"""The process that compiles in the background: what it is told, what it must not touch, and every way it can be lost."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from layerzero import compile_child, compile_worker
from layerzero.compile_child import ChildError, CompileChild, NotCompiledError, UnavailableError
from processes import PACKAGE

if sys.platform != "linux":
    pytest.skip("processes are waited for by pidfd", allow_module_level=True)

#: Whoever waits longer than this has been forgotten.
SOON_MS = 60_000

#: A worker that has started; what it does with requests comes after.
READY = """
import json, os, signal, subprocess, sys
requests, answers = {requests}, {answers}
def say(answer): os.write(answers, json.dumps(answer).encode() + b"\\n")
say(dict(ready=True))
for line in os.fdopen(requests, "rb"):
    request = json.loads(line)
"""


def ended(pid: int) -> bool:
    """Whether a process is over, or is so soon."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        return bool(end.poll(SOON_MS))
    finally:
        os.close(descriptor)


@pytest.fixture
def child() -> Iterator[CompileChild]:
    made = CompileChild()
    yield made
    pid = made.status().pid
    made.end()
    assert pid is None or ended(pid)


def worker(monkeypatch: pytest.MonkeyPatch, code: str, start: str = READY) -> None:
    """Has children run this instead of the worker, for each request after it is read."""
    lines = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    monkeypatch.setattr(compile_child, "_CODE", start + lines)


def test_it_answers_what_it_is_asked(child: CompileChild, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "say(dict(id=request['id'], ms=len(request['call']) + 0.5))")
    assert child.status().by == "nobody"
    assert [child.compile("a.kernel", call=call) for call in ("a", "bcd")] == [1.5, 3.5]
    status = child.status()
    assert (status.by, status.compiled, status.lost, status.why) == ("child", 2, 0, None)


def test_it_shares_nothing_but_the_environment(
    child: CompileChild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    worker(
        monkeypatch,
        f"""
        print("noise", flush=True); print("noise", file=sys.stderr, flush=True)
        seen = [sys.stdin.read(), os.getsid(0) == os.getpid(), os.environ["TRITON_CACHE_DIR"],
                os.environ[{compile_child.MARK!r}], sorted(os.listdir("/proc/self/fd"))]
        open({str(told)!r}, "w").write(json.dumps(seen))
        say(dict(id=request['id'], ms=1))
        """,
    )
    child.compile("a.kernel")
    stdin, own_session, cache, mark, descriptors = json.loads(told.read_text())
    assert (stdin, own_session, cache, mark) == ("", True, str(tmp_path), "1")
    # Input, output and errors, both pipes, and what the listing itself opened.
    assert len(descriptors) <= 6, descriptors
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os._exit(1)", "ended with exit code 1 while compiling a.kernel"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL while compiling a.kernel"),
        ("print('ptxas fatal: no'); sys.stdout.flush(); os._exit(3)", "exit code 3 while compiling a.kernel: ptxas fatal: no"),
        ("os.write(answers, b'garbage\\n')", "answered b'garbage' while compiling a.kernel"),
        ("os.write(answers, b'[1]\\n')", "answered b'[1]' while compiling a.kernel"),
        ("say(dict(id=77, ms=1))", "answered {'id': 77, 'ms': 1} to a request for a.kernel"),
        ("signal.pause()", "was not done with compiling a.kernel after 0.3 s"),
    ],
)  # fmt: skip
def test_one_that_is_lost_is_replaced(
    child: CompileChild, monkeypatch: pytest.MonkeyPatch, code: str, how: str
) -> None:
    monkeypatch.setattr(compile_child, "COMPILING_S", 0.3)
    monkeypatch.setattr(compile_child, "_LOOK_S", 0.1)
    worker(monkeypatch, code)
    assert child.start()
    pid = child.status().pid
    assert pid is not None
    with pytest.raises(ChildError) as error:
        child.compile("a.kernel")
    assert how in str(error.value) and not isinstance(error.value, NotCompiledError | UnavailableError)
    assert ended(pid)
    status = child.status()
    assert (status.by, status.pid, status.lost) == ("child", None, 1) and how in str(status)
    worker(monkeypatch, "say(dict(id=request['id'], ms=2))")
    assert child.compile("a.kernel") == 2.0
    assert child.status().pid not in (None, pid)


def test_what_it_could_not_compile_is_no_loss(child: CompileChild, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "say(dict(id=request['id'], error='ValueError: no'))")
    assert child.start()
    pid = child.status().pid
    for _ in range(2):
        with pytest.raises(NotCompiledError, match="^ValueError: no$"):
            child.compile("a.kernel")
    assert (child.status().pid, child.status().lost) == (pid, 0)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(4)", "ended with exit code 4 while starting"),
        ('import os; os.write({answers}, b\'{{"error": "no torch"}}\\n\')', "could not start: no torch"),
        ("raise ImportError('of the environment')", "while starting: ImportError: of the environment"),
    ],
)
def test_one_that_cannot_start_is_not_tried_again(
    child: CompileChild, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(compile_child, "_CODE", code)
    with pytest.raises(UnavailableError) as error:
        child.compile("a.kernel")
    assert why in str(error.value)
    assert not child.start()
    assert child.status().by == "thread" and why in str(child.status())


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/uwsgi", "/nowhere/python3"])
def test_where_there_is_no_interpreter(
    child: CompileChild, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert not child.start() and not child.start()
    with pytest.raises(UnavailableError):
        child.compile("a.kernel")
    status = child.status()
    assert status.by == "thread" and status.why is not None
    assert "no other can be started" in str(status) and (executable or "sys.executable") in str(status)


def test_a_child_starts_no_children(child: CompileChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_child.MARK, "1")
    assert not child.start()
    assert "itself one that compiles" in str(child.status())


def test_the_end_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, "signal.pause()")
    child = CompileChild()
    assert child.start()
    pid = child.status().pid
    assert pid is not None
    begun = time.monotonic()
    child.end()
    assert time.monotonic() - begun < SOON_MS / 1e3
    assert ended(pid) and not child.start()
    with pytest.raises(UnavailableError, match="the program is ending"):
        child.compile("a.kernel")


#: A program whose worker has a compiler of its own running. Both, and the guard, are in one group.
PROGRAM = """
import json, os, sys
from layerzero import compile_child, compile_worker
compile_child._CODE = '''
import sys; sys.path[:] = {path!r}
import json, os, subprocess, time
from layerzero import compile_worker
compile_worker.end_with_the_program({requests}, {answers})
program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
os.write({answers}, json.dumps(dict(ready=True)).encode() + b"\\\\n")
os.write({answers}, json.dumps(dict(id=1, ms=program.pid)).encode() + b"\\\\n")
# Nothing here sees that the requests have ended.
while True: time.sleep(1)
'''
child = compile_child.CompileChild()
compiler = int(child.compile("a.kernel"))
print(json.dumps([child.status().pid, compiler]), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -9),
        ("sys.exit(3)", 3),
        ("if os.fork() == 0: import signal; signal.pause()\nos._exit(7)", 7),
    ],
)
def test_it_ends_with_the_program_and_so_do_its_compilers(end: str, status: int) -> None:
    """However the program ends, and although the worker looks at nothing: the guard does."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + end],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        try:
            assert program.wait(SOON_MS / 1e3) == status
            assert line, program.stderr.read() if program.stderr else ""
            assert all(ended(pid) for pid in json.loads(line))
        finally:
            # A fork that the program left.
            try:
                os.killpg(program.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_the_worker_says_what_a_compiler_raises() -> None:
    told = compile_worker._answer({"id": 3, "kernel": "a.kernel", "ahead": ["layerzero.no_such_module", {}]})
    assert told["id"] == 3 and "no_such_module" in told["error"] and "ms" not in told


def leave(file: Path) -> None:
    file.write_text(str(os.getpid()))


def test_several_things_are_done_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own; with one processor, here."""
    files = [tmp_path / str(number) for number in range(5)]
    for processors, processes in (({0, 1}, 5), ({0}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, found=processors: found)
        compile_worker.side_by_side([partial(leave, file) for file in files])
        pids = {int(file.read_text()) for file in files}
        assert len(pids) == processes and (os.getpid() in pids) == (processes == 1)


def test_what_one_of_them_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ValueError, match="not this one"):
        compile_worker.side_by_side([refuse, partial(leave, tmp_path / "other")])
    assert (tmp_path / "other").exists()
    killed = [lambda: os.kill(os.getpid(), signal.SIGSEGV), partial(leave, tmp_path / "other")]
    with pytest.raises(RuntimeError, match="killed by SIGSEGV"):
        compile_worker.side_by_side(killed)
