"""What the command line is given by others (bytes, escape sequences, files) does no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import layerzero as lz
import processes
import pytest

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u009b31m"


def layerzero(*arguments: str | bytes, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(processes.PACKAGE), **variables}
    command: list[str | bytes] = [sys.executable, "-m", "layerzero", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    "arguments", [(b"ops", b"\xff\xfe"), (b"\xff",), (b"explain", b"--device", b"\xe9", b"attention")]
)
def test_an_argument_that_is_not_utf8_is_a_usage_error(arguments: tuple[bytes, ...]) -> None:
    done = layerzero(*arguments)
    assert done.returncode == 2, done
    assert b"Traceback" not in done.stderr and b"error[USAGE]" in done.stderr


def test_escape_sequences_are_shown_and_not_sent(tmp_path: Path) -> None:
    for arguments, variables in (
        (("config", "show", "prefer_sources"), {"LAYERZERO_PREFER": ESCAPES}),
        (("config", "check"), {"LAYERZERO_STRICT_MODE": ESCAPES}),
        (("ops", ESCAPES), {}),
        (("config", "show", "--color", "always", "prefer_sources"), {"LAYERZERO_PREFER": ESCAPES}),
    ):
        done = layerzero(*arguments, **variables)
        said = (done.stdout + done.stderr).decode()
        assert "owned" in said, arguments
        assert not set(said) & set("\x07\u009b") and "\x1b]" not in said and "\x1b[2J" not in said, arguments
        assert "\\x1b" in said or "\\u001b" in said or "\\x1b" in repr(said), arguments


def test_errors_show_control_characters() -> None:
    with pytest.raises(lz.LayerZeroError) as caught:
        lz.which(ESCAPES)
    assert "\x1b" not in str(caught.value) and "owned" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "root:$6$salt$verysecret:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
        "- verysecret\n- other\n",
        "password: verysecret\nhost: [1, 2]\n",
        "key: 'verysecret\n: [",
        "verysecret",
    ],
)
def test_an_included_file_that_is_not_ours_is_not_quoted(tmp_path: Path, content: str) -> None:
    (tmp_path / "shadow").write_text(content, encoding="utf-8")
    (tmp_path / "layerzero.yaml").write_text("include: [shadow]\n", encoding="utf-8")
    done = layerzero("config", "check", LAYERZERO_CONFIG=str(tmp_path / "layerzero.yaml"))
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 3 and "is no LayerZero configuration" in said
    assert "secret" not in said and "salt" not in said and "daemon" not in said
