"""`layerzero compat` that is stopped: its processes end, and what was known before is still there, whole."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from compat_places import Place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by pidfd_open of Linux")

#: How long anything that is waited for may take before the test fails.
PATIENCE = 60
KERNELS = {"gelu": "return F.gelu(input, approximate=approximate)"}
#: Interrupts reach it, wherever the tests are run: a shell has what it starts in the background ignore them.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from layerzero.__main__ import main; sys.exit(main())"
)
#: A library that starts a process, tells the numbers of both, and never ends.
HANGS = """
    import os, subprocess, sys, threading
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    with open({told!r}, "w") as told:
        told.write(f"{{os.getpid()}} {{child.pid}}")
    threading.Event().wait()
"""


@contextmanager
def running(place: Place) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The command, once the library is imported that hangs, and that library's processes."""
    arguments = [sys.executable, "-c", COMMAND, "compat", "--timeout", "300"]
    with subprocess.Popen(
        arguments, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        # Opens once the library has opened it, too.
        with (place.folder / "told").open() as told:
            processes = [os.pidfd_open(int(number)) for number in told.read().split()]
        try:
            yield command, processes
        finally:
            command.kill()
            for process in processes:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


def ends(process: int) -> bool:
    """Whether it does, by itself."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(PATIENCE * 1000))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A library that works, and a place for two more; where one that hangs tells its processes."""
    made = Place(tmp_path, ("first", "second", "last"))
    made.add("first", "", KERNELS)
    os.mkfifo(tmp_path / "told")
    return made


def hanging(place: Place, beside: str | None = None) -> str:
    """The text of a library that hangs, always or beside another."""
    text = HANGS.format(told=str(place.folder / "told"))
    return f"import sys\nif {f'{beside!r} in sys.modules' if beside else True}:{text}"


@pytest.mark.parametrize("when", ["alone", "together"])
def test_an_interrupt_ends_everything_and_changes_no_file(place: Place, when: str) -> None:
    place.add("second", hanging(place, None if when == "alone" else "lib_first"), KERNELS)
    place.add("last", "", KERNELS)
    known = '{"schema_version": 1, "entries": [], "pairs": []}'
    place.file.parent.mkdir(parents=True)
    place.file.write_text(known)
    with running(place) as (command, processes):
        command.send_signal(signal.SIGINT)
        printed, told = command.communicate(timeout=PATIENCE)
        assert all(map(ends, processes)), "a process outlives the command"
    assert (command.returncode, printed) == (130, "")
    assert told == "stopped; nothing was written\n"
    assert place.file.read_text() == known and list(place.file.parent.iterdir()) == [place.file]


def test_what_is_tried_ends_with_the_command(place: Place) -> None:
    place.add("second", hanging(place), KERNELS)
    place.add("last", "", KERNELS)
    with running(place) as (command, (probe, _)):
        command.terminate()
        assert ends(probe), "the probe outlives the command"
