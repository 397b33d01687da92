"""Configuration files that are watched: however they change, and whatever is in them then."""

from __future__ import annotations

import logging
import queue
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
from in_force import COMPOSED, PLAIN, REFERENCE, chosen, said
from listening import listening, wait_for

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("restored"),
]


def text(kernel: str, **more: Any) -> str:
    """A file that is watched, with a lock."""
    lines = ["watch: true", "watch_debounce_ms: 5", f"locks:\n  rms_norm: {kernel}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in more.items())]) + "\n"


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
