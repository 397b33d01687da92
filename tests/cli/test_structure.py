"""The engine's floors: nobody uses a floor above, no two files use each other, the core knows no files and no settings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import structure

EDGES = structure.Sources.read(structure.SOURCE).edges()


def test_nobody_uses_a_floor_above() -> None:
    assert structure.upward(EDGES) == []


def test_no_two_files_use_each_other() -> None:
    assert structure.cycles(EDGES) == []


@pytest.mark.parametrize("path", sorted(p for p in EDGES if p.startswith("core/")))
def test_the_core_knows_no_files_settings_or_thread_locals(path: str) -> None:
    text = re.sub(r"//.*", "", (structure.SOURCE / path).read_text())
    known = re.findall(r"\b(?:lz_config|lz_perfdb|std::fs|std::env|thread_local|crate::files)\b", text)
    assert known == []


def test_services_do_not_know_each_other() -> None:
    def service(path: str) -> str:
        # These two are files of one service, the state directory.
        name = path.split("/")[1].removesuffix(".rs")
        return "state_files" if name in ("failures_file", "status") else name

    pairs = [(path, used) for path, all_used in EDGES.items() for used in all_used]
    both = [(p, u) for p, u in pairs if p.startswith("services/") and u.startswith("services/")]
    assert [(p, u) for p, u in both if service(p) != service(u)] == []


def test_a_broken_structure_is_seen() -> None:
    files = {
        "lib.rs": "mod core; mod engine; mod error;",
        "error.rs": "use crate::core::Core;",
        "core/mod.rs": "mod state;\npub use state::State;\npub struct Core;",
        "core/state.rs": "use super::Core;\nuse crate::error::{Error, Other};\npub struct State;",
        "engine/mod.rs": "mod jit;\nuse crate::core::{Core, State};",
        "engine/jit.rs": "use super::Engine; // use crate::error::Error;",
    }
    edges = structure.Sources(files).edges()
    assert edges["engine/mod.rs"] == {"core/mod.rs", "core/state.rs"}
    assert edges["engine/jit.rs"] == {"engine/mod.rs"}
    assert structure.upward(edges) == [("error.rs", "core/mod.rs")]
    assert structure.cycles(edges) == []
    files["core/mod.rs"] += "\nuse crate::error::Error;"
    assert structure.cycles(structure.Sources(files).edges()) == [["core/mod.rs", "error.rs"]]
