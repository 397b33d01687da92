"""Files of compiled models: what is damaged, foreign or made up is refused with a clear error, and never run."""

from __future__ import annotations

import collections
import enum
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import nesting
from layerzero.saved_graphs import condition
from strategies import SCALE
from torch import nn
from torch.utils import _pytree as pytree


def model() -> nn.Module:
    """A small model, whose file is small."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A good file."""
    return lz.compile(model(), torch.randn(2, 4)).save(tmp_path / "model.plan")


def refused(path: Path, data: bytes, **options: Any) -> str:
    """The error for a file with these contents."""
    path.write_bytes(data)
    with pytest.raises(lz.ConfigurationError) as raised:
        lz.load_plan(path, **options)
    assert raised.value.code == "BAD_PLAN"
    assert "lz.compile" in str(raised.value)
    return str(raised.value)


def with_head(path: Path, change: Any) -> bytes:
    """The file with another head, whose checksum and length are right."""
    data = path.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    head = json.loads(data[48 : 48 + length])
    weights = data[-(-(48 + length) // 64) * 64 :]
    changed = change(head)
    text = json.dumps(head if changed is None else changed).encode()
    start = b"LZPLAN03" + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    return start + bytes(-len(start) % 64) + weights


def test_every_byte_of_the_start_and_of_the_head_counts(plan: Path) -> None:
    """One bit is turned in each."""
    whole = plan.read_bytes()
    length = int.from_bytes(whole[8:16], "little")
    places = [*range(48), *random.Random(0).sample(range(48, 48 + length), 60 if SCALE < 1 else length)]
    for place in places:
        for bit in (0x01, 0x80):
            data = bytearray(whole)
            data[place] ^= bit
            refused(plan, bytes(data))


def test_every_byte_of_the_weights_counts(plan: Path) -> None:
    whole = plan.read_bytes()
    length = int.from_bytes(whole[8:16], "little")
    rows = json.loads(whole[48 : 48 + length])["weights"]
    first = -(-(48 + length) // 64) * 64
    for row in rows:
        for place in range(row["offset"], row["offset"] + row["length"]):
            data = bytearray(whole)
            data[first + place] ^= 0x10
            assert "does not match its checksum" in refused(plan, bytes(data))


def test_every_length_counts(plan: Path) -> None:
    """Files that were cut off, and one that has too much."""
    whole = plan.read_bytes()
    lengths = range(len(whole)) if SCALE >= 1 else [*range(64), *range(64, len(whole), 97), len(whole) - 1]
    for length in lengths:
        refused(plan, whole[:length])
    assert "it was cut off" in refused(plan, whole[:-1])
    refused(plan, whole + b"\0")


def test_lengths_that_lie(plan: Path) -> None:
    whole = plan.read_bytes()
    for length in (0, 1, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(whole)):
        refused(plan, whole[:8] + length.to_bytes(8, "little") + whole[16:])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        b"\x80\x02}q\x00.",
        b"LZPLAN",
        b"LZPLAN99" + bytes(100),
        b"{}",
        b"\x7fELF" + bytes(200),
    ],
)
def test_foreign_files(tmp_path: Path, data: bytes) -> None:
    said = refused(tmp_path / "other", data)
    assert ("it does not begin as one" in said) or ("version 99" in said)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(lz.ConfigurationError) as raised:
            lz.load_plan(path)
        assert raised.value.code == "UNREADABLE_FILE"


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "x",
    "float32",
    [],
    [[]],
    {},
    [None],
    [2**40, 2**40],
    "../../etc/passwd",
]


@pytest.mark.filterwarnings("ignore")
def test_heads_that_were_made_up(plan: Path) -> None:
    """A good checksum, and something strange in each place: an error, or a plan that runs; never a crash.

    Results stay the same where what changed is neither the graph nor which of its results are given.
    """
    good = plan.read_bytes()
    x = torch.randn(2, 4)
    expected = lz.load_plan(plan)(x)
    rng = random.Random(1)
    served = 0
    for _ in range(300 if SCALE < 1 else 10_000):
        changed = ""

        def change(head: dict[str, Any]) -> Any:
            nonlocal changed
            place: Any = head
            path: Any = rng.choice([*head, "document"])
            changed = path
            if path == "document" and rng.random() < 0.8:
                document = json.loads(head["document"])
                _spoil(document, rng)
                head["document"] = json.dumps(document)
                return None
            if rng.random() < 0.1:
                del head[path]
                return None
            if isinstance(place[path], (list, dict)) and place[path]:
                _spoil(place[path], rng)
            else:
                place[path] = rng.choice(STRANGE)
            return None

        plan.write_bytes(good)
        plan.write_bytes(with_head(plan, change))
        try:
            loaded = lz.load_plan(plan)
            found = loaded(x)
        except lz.LayerZeroError:
            continue
        if changed not in ("document", "given", "results"):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            served += 1
    assert served > 20


def _spoil(tree: Any, rng: random.Random) -> None:
    """Something strange in one place of nested data."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.8:
            tree = tree[key]
            continue
        tree[key] = rng.choice(STRANGE)
        return


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"x"', "{}", "{", "\xff", "[" * 5000, '{"weights_length": 0, "weights": 3}']
)
def test_heads_of_another_form(plan: Path, text: str) -> None:
    data = text.encode("latin-1")
    start = b"LZPLAN03" + len(data).to_bytes(8, "little") + hashlib.sha256(data).digest() + data
    refused(plan, start + bytes(-len(start) % 64))


class Colour(enum.Enum):
    """An enum, which torch's reader would import."""

    RED = 1


def test_a_nesting_imports_nothing() -> None:
    """torch's own reader imports the modules that a text names."""
    evil = [
        {"type": "collections.defaultdict", "context": {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}, "children_spec": []},
        {"type": "builtins.dict", "context": json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}]), "children_spec": []},
        {"type": "builtins.dict", "context": '[{"\\u005f_enum__": true, "fqn": "antigravity:x", "name": "y"}]', "children_spec": []},
        {"type": "no.such.Class", "context": "null", "children_spec": []},
    ]  # fmt: skip
    for row in evil:
        with pytest.raises(nesting.NestingError):
            nesting.loads(json.dumps([1, row]))
    assert "antigravity" not in sys.modules


def test_nestings_are_read_as_they_were_written() -> None:
    for tree in ((1, [2, {"a": 3, "b": (4, None)}]), collections.OrderedDict(a=1, b=[2]), ((1,), {"x": 2}), 7, []):
        spec = pytree.tree_structure(tree)
        assert nesting.loads(nesting.dumps(spec)) == spec
    for tree in (collections.defaultdict(list, a=1), {Colour.RED: 1}):
        with pytest.raises(nesting.NestingError):
            nesting.dumps(pytree.tree_structure(tree))


def test_a_result_that_a_file_cannot_hold_is_refused_when_it_is_written(tmp_path: Path) -> None:
    def grouped(x: torch.Tensor) -> Any:
        found = collections.defaultdict(list)
        found["a"] = x + 1
        return found

    compiled = lz.compile(grouped, torch.randn(2))
    with pytest.raises(lz.InvalidCallError, match="defaultdict") as raised:
        compiled.save(tmp_path / "x.plan")
    assert raised.value.code == "NOT_EXPORTABLE"


@pytest.mark.parametrize(
    "text", ["1" * 1999 + "x", "__import__('os')", "s0**s0", "s0.real", "lambda: 0", "(" * 900, "Max(s0,"]
)
def test_conditions_are_no_code(text: str) -> None:
    with pytest.raises(ValueError, match="condition|parse"):
        condition(text)


def test_conditions_are_read_as_they_were_written() -> None:
    for text in ("Eq(Mod(s0, 2), 0)", "s0 <= 4*s1", "(s0 > 2) & Ne(s0, s1)", "((s0//2)) >= 1"):
        assert str(condition(str(condition(text)))) == str(condition(text))


def test_a_plan_of_other_hardware_runs_with_a_warning(plan: Path) -> None:
    """Kernels are not in the file: they are chosen where it is read."""
    x = torch.randn(2, 4)
    expected = lz.load_plan(plan)(x)
    plan.write_bytes(with_head(plan, lambda head: head.update(hardware="a CPU of the year 2100")))
    with pytest.warns(UserWarning, match="written on a CPU of the year 2100; its kernels are chosen anew"):
        loaded = lz.load_plan(plan)
    assert torch.equal(loaded(x), expected)
