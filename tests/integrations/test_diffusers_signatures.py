"""What diffusers calls of ours has the arguments of what it replaces, in every version of `testdata/signatures`.

Nothing of diffusers is imported: `scripts/signatures.py` has read its source.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
from layerzero.integrations._diffusers import attention as diffusers_attention

ROOT = Path(__file__).parents[2]
DISPATCH = "diffusers.models.attention_dispatch"
PROCESSOR = "diffusers.models.attention_processor"
SNAPSHOTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))["functions"]
    for path in sorted((ROOT / "testdata" / "signatures").glob("diffusers-*.json"))
}


def names(written: list[str]) -> list[str]:
    """The names of the parameters of a snapshot, without those that gather the rest."""
    return [entry.partition("=")[0] for entry in written if not entry.startswith("*")]


def called(name: str) -> list[str]:
    """The parameters of a processor of ours. Its file imports diffusers, so it is read."""
    source = (ROOT / "python/layerzero/integrations/_diffusers/processors.py").read_text(encoding="utf-8")
    (kind,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    (call,) = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    return [argument.arg for argument in call.args.args if argument.arg != "self"]


def test_there_are_a_new_and_an_old_version() -> None:
    assert set(SNAPSHOTS) >= {"diffusers-0.42.1", "diffusers-0.35.2"}


@pytest.mark.parametrize("version", SNAPSHOTS)
def test_the_function_of_the_backend_has_the_arguments_of_native(version: str) -> None:
    functions = SNAPSHOTS[version]
    ours = inspect.signature(diffusers_attention.attend).parameters
    native = functions[f"{DISPATCH}._native_attention"]
    for entry in native:
        name, _, default = entry.partition("=")
        assert name in ours
        assert default in ("", str(ours[name].default)), name
    # What the dispatcher is given and `native` is not would be dropped there too.
    dispatched = set(names(functions[f"{DISPATCH}.dispatch_attention_fn"]))
    assert dispatched - set(ours) == {"attention_kwargs", "backend"} | (dispatched & {"parallel_config"})
    assert names(functions[f"{DISPATCH}._AttentionBackendRegistry.register"])[0] == "backend"


@pytest.mark.parametrize("version", SNAPSHOTS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("LayerZeroAttnProcessor", "AttnProcessor2_0"),
        ("LayerZeroAttnProcessor", "FusedAttnProcessor2_0"),
        ("LayerZeroJointAttnProcessor", "JointAttnProcessor2_0"),
    ],
)
def test_a_processor_has_the_arguments_of_the_one_it_replaces(version: str, ours: str, theirs: str) -> None:
    wanted = names(SNAPSHOTS[version][f"{PROCESSOR}.{theirs}.__call__"])
    assert called(ours)[: len(wanted)] == wanted


@pytest.mark.parametrize("version", SNAPSHOTS)
def test_what_a_processor_calls_of_its_module(version: str) -> None:
    functions = SNAPSHOTS[version]
    wanted = ["attention_mask", "target_length", "batch_size"]
    assert names(functions[f"{PROCESSOR}.Attention.prepare_attention_mask"])[:3] == wanted
    assert names(functions[f"{PROCESSOR}.Attention.set_processor"]) == ["processor"]
