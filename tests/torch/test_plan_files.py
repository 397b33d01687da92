"""Files of compiled models: what is written is read, and nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from layerzero import plan_files
from layerzero.errors import ConfigurationError

WEIGHTS = {
    "w": torch.randn(5, 7),
    "half": torch.randn(3, 3).bfloat16(),
    "turned": torch.arange(12).reshape(3, 4).t(),
    "none": torch.empty(0, 4),
    "one": torch.tensor(True),
}
HEAD = {"format": 1, "document": '{"name": "é"}'}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return plan_files.write(tmp_path / "model.plan", HEAD, WEIGHTS)


def test_what_is_written_is_read(path: Path) -> None:
    found = plan_files.read(path)
    assert {name: found.head[name] for name in HEAD} == HEAD
    for weight, (name, row) in zip(found.weights, zip(WEIGHTS, found.head["weights"], strict=True), strict=True):
        assert row["name"] == name
        assert torch.equal(weight, WEIGHTS[name])
        assert weight.data_ptr() % 64 == 0 or weight.numel() == 0
    assert list(path.parent.iterdir()) == [path]


def test_weights_share_the_memory_of_the_file(path: Path) -> None:
    """Changing one changes neither the file nor what is read next."""
    before = path.read_bytes()
    plan_files.read(path).weights[0].zero_()
    assert path.read_bytes() == before
    assert torch.equal(plan_files.read(path).weights[0], WEIGHTS["w"])


def test_a_file_that_was_cut_off_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigurationError, match="no plan") as raised:
            plan_files.read(path)
        assert raised.value.code == "BAD_PLAN"


def test_no_changed_byte_goes_unnoticed(path: Path) -> None:
    whole, draws = path.read_bytes(), random.Random(0)
    rows = plan_files.read(path).head["weights"]
    first = len(whole) - max(row["offset"] + -(-row["length"] // 64) * 64 for row in rows)
    head_end = plan_files._HEAD_AT + int.from_bytes(whole[8:16], "little")
    used = [*range(head_end)]
    used += [first + row["offset"] + i for row in rows for i in range(row["length"])]
    for _ in range(300):
        place = draws.choice(used)
        changed = bytearray(whole)
        changed[place] ^= 1 << draws.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ConfigurationError):
            plan_files.read(path)


@pytest.mark.parametrize("foreign", [b"", b"PK\x03\x04" * 100, b"LZPLAN01" + bytes(200), b"{}" * 40])
def test_other_files_are_refused(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "foreign").write_bytes(foreign)
    with pytest.raises(ConfigurationError, match="no plan") as raised:
        plan_files.read(tmp_path / "foreign")
    assert raised.value.hint
    with pytest.raises(ConfigurationError, match="cannot be read"):
        plan_files.read(tmp_path / "absent")


def test_a_failed_write_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises((TypeError, AttributeError)):
        plan_files.write(path, HEAD, {"w": None})  # type: ignore[dict-item]
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
