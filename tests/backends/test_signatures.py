"""The fakes have the signatures of the libraries: those of `testdata/signatures`, written by `scripts/signatures.py`."""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_flash_attn
import fake_flashinfer
import fake_flashinfer_pages
import fake_rocm
import fake_sglang
import fake_vllm
import fake_xformers
import pytest
import test_backend_flashinfer_other
import test_backend_liger
import test_backend_torchao
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "testdata" / "signatures"
#: Libraries that call ours: tests/integrations has their tests.
CALLERS = ("diffusers",)
SNAPSHOTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.json"))
    if path.stem.rpartition("-")[0] not in CALLERS
}


def members(fake: object, *names: str) -> dict[str, Any]:
    """Functions of a fake by their names."""
    return {name: getattr(fake, name) for name in names}


def wrapper(fake: type[Any]) -> dict[str, Any]:
    """What is called of a wrapper of FlashInfer's."""
    return {f"{fake.__name__}.{name}": getattr(fake, name) for name in ("__init__", "plan", "run")}


#: By library, then by module: the fakes of its functions.
FAKES: dict[str, dict[str, dict[str, Callable[..., Any]]]] = {
    "flash_attn": {
        "flash_attn": members(
            fake_flash_attn.FlashAttention2(), "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
        )
    },
    "flash_attn_3": {
        "flash_attn_interface": members(
            fake_flash_attn.FlashAttention3(), "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
        )
    },
    "flash_attn_4": {
        "flash_attn.cute": members(fake_flash_attn.FlashAttention4(), "flash_attn_func", "flash_attn_varlen_func")
    },
    "flashinfer": {
        "flashinfer": {
            **members(fake_flashinfer.FlashInfer(), "single_prefill_with_kv_cache"),
            **members(fake_flashinfer_pages, "merge_state_in_place"),
            **wrapper(fake_flashinfer.BatchPrefillWithRaggedKVCacheWrapper),
            **wrapper(fake_flashinfer_pages.BatchPrefillWithPagedKVCacheWrapper),
            **wrapper(fake_flashinfer_pages.BatchDecodeWithPagedKVCacheWrapper),
            **wrapper(fake_flashinfer_pages.MultiLevelCascadeAttentionWrapper),
            **wrapper(fake_flashinfer.BlockSparseAttentionWrapper),
            **wrapper(fake_flashinfer.VariableBlockSparseAttentionWrapper),
            **members(
                test_backend_flashinfer_other.Rows(),
                "rmsnorm",
                "layernorm",
                "apply_rope_with_cos_sin_cache",
                "top_p_sampling_from_probs",
                "top_k_sampling_from_probs",
            ),
        },
        "flashinfer.mla": wrapper(fake_flashinfer.BatchMLAPagedAttentionWrapper),
    },
    "liger": {
        module: {f"{name}.forward": fake.apply for name, fake in contents.items()}
        for module, contents in test_backend_liger.MODULES["liger"].items()
    },
    "quack": test_backend_liger.MODULES["quack"],
    "xformers": {"xformers.ops.fmha": members(fake_xformers.Xformers(), "memory_efficient_attention")},
    "torchao": {"torchao.quantization.quant_primitives": members(test_backend_torchao, "dequantize_affine")},
    "aiter": {
        "aiter": members(
            fake_rocm.Aiter(),
            "flash_attn_func",
            "rmsnorm2d_fwd",
            "rmsnorm2d_fwd_with_add",
            "layernorm2d_fwd",
            "rope_cached_fwd",
            "rope_cached_positions_fwd",
        )
    },
    "vllm": {
        "vllm.v1.attention.backend": {
            "AttentionMetadataBuilder._init_reorder_batch_threshold": (
                fake_vllm.AttentionMetadataBuilder._init_reorder_batch_threshold
            )
        },
        "vllm.v1.attention.backends.utils": members(fake_vllm, "split_decodes_and_prefills"),
        "vllm.v1.attention.backends.registry": {
            **members(fake_vllm, "register_backend"),
            "AttentionBackendEnum.get_path": fake_vllm.Registered.get_path,
            "AttentionBackendEnum.is_overridden": fake_vllm.Registered.is_overridden,
        },
        "vllm.config": members(fake_vllm, "get_current_vllm_config_or_none"),
    },
    "vllm_backend": {
        "vllm.v1.attention.backend": {
            f"{owner.__name__}.{name}": getattr(owner, name)
            for owner, names in (
                (fake_vllm.AttentionBackend, ("get_name", "get_impl_cls", "get_builder_cls")),
                (fake_vllm.AttentionImpl, ("__init__", "forward")),
                (fake_vllm.AttentionMetadataBuilder, ("__init__", "build", "build_for_cudagraph_capture")),
            )
            for name in names
        },
    },
    "sglang": {
        "sglang.srt.layers.attention.attention_registry": members(fake_sglang, "register_attention_backend"),
        "sglang.srt.layers.attention.base_attn_backend": {
            f"AttentionBackend.{name}": getattr(fake_sglang.AttentionBackend, name)
            for name in (
                "init_forward_metadata",
                "init_cuda_graph_state",
                "init_forward_metadata_out_graph",
                "init_forward_metadata_in_graph",
                "get_cuda_graph_seq_len_fill_value",
                "forward_decode",
                "forward_extend",
            )
        },
    },
    "vllm_ir": {
        "vllm.ir.op": {"IrOp.register_impl": fake_vllm.IrOp.register_impl},
        "vllm.ir.ops": members(fake_vllm, "rms_norm", "fused_add_rms_norm"),
    },
}


#: The version that the fake of a library imitates.
IMITATED = {
    "flash_attn": "2.8.3",
    "flash_attn_3": "0251105",
    "flash_attn_4": "4.0.0b27",
    "flashinfer": fake_flashinfer.VERSION,
    "liger": "0.8.5",
    "quack": "0.6.5",
    "xformers": "0.0.35",
    "torchao": "0.18.0",
    "aiter": "0.1.20",
    "sglang": fake_sglang.VERSION,
    "vllm": "0.17.1",
    "vllm_backend": fake_vllm.VERSION,
    "vllm_ir": fake_vllm.VERSION,
}


def fakes(library: str) -> dict[str, Callable[..., Any]]:
    """The fakes of a library by their full names."""
    return {f"{module}.{name}": fake for module, contents in FAKES[library].items() for name, fake in contents.items()}


def constant(text: str) -> Any:
    """A default that is written out, or the text of one that is not."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def parsed(written: list[str]) -> list[inspect.Parameter]:
    """The parameters of a snapshot."""
    found: list[inspect.Parameter] = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for entry in written:
        name, _, default = entry.partition("=")
        if name == "/":
            found = [parameter.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for parameter in found]
        elif name.startswith("**"):
            found.append(inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD))
        elif name.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if name != "*":
                found.append(inspect.Parameter(name[1:], inspect.Parameter.VAR_POSITIONAL))
        else:
            found.append(
                inspect.Parameter(name, kind, default=constant(default) if default else inspect.Parameter.empty)
            )
    return found


def has(fake: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a fake, without `self` and types."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(fake).parameters.values()]
    return [
        p.replace(default=str(p.default)) if isinstance(p.default, (torch.dtype, enum.Enum)) else p
        for p in parameters
        if p.name != "self"
    ]


def missing(fake: list[inspect.Parameter], library: list[inspect.Parameter]) -> list[str]:
    """What a call that the fake accepts may not do with the library."""
    by_name = {parameter.name: parameter for parameter in library}
    wrong = []
    for at, mine in enumerate(fake):
        theirs = by_name.get(mine.name)
        if theirs is None:
            wrong.append(f"{mine.name} is no parameter")
        elif theirs.kind != mine.kind:
            wrong.append(f"{mine.name} is {theirs.kind.description}, not {mine.kind.description}")
        elif mine.default not in (inspect.Parameter.empty, theirs.default):
            wrong.append(f"{mine.name} is {theirs.default!r} where it is not passed, not {mine.default!r}")
        elif mine.default is mine.empty and mine.kind is mine.POSITIONAL_OR_KEYWORD and library[at].name != mine.name:
            # Parameters without a default are passed by position.
            wrong.append(f"{mine.name} is not at place {at}")
    return wrong + [
        f"{theirs.name} must be passed"
        for theirs in library
        if theirs.default is theirs.empty
        and theirs.kind not in (theirs.VAR_POSITIONAL, theirs.VAR_KEYWORD)
        and theirs.name not in {parameter.name for parameter in fake}
    ]


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_snapshot_and_the_fakes_are_of_the_same_functions(snapshot: str) -> None:
    document = SNAPSHOTS[snapshot]
    assert snapshot == f"{document['library']}-{document['version']}"
    assert set(document["functions"]) == set(fakes(document["library"]))


@pytest.mark.parametrize("library", FAKES)
def test_a_fake_has_the_signatures_of_the_version_it_imitates(library: str) -> None:
    functions = SNAPSHOTS[f"{library}-{IMITATED[library]}"]["functions"]
    for name, fake in fakes(library).items():
        assert has(fake) == parsed(functions[name]), name


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_what_a_fake_accepts_every_version_accepts(snapshot: str) -> None:
    """Adapters are tested with the fakes, so their calls are calls that the fakes accept."""
    document = SNAPSHOTS[snapshot]
    for name, fake in fakes(document["library"]).items():
        assert not missing(has(fake), parsed(document["functions"][name])), name


def test_what_a_new_version_breaks_is_found() -> None:
    fake = parsed(["q", "k", "causal=False"])
    assert missing(fake, parsed(["q", "k", "causal=False", "*", "sink=None"])) == []
    assert missing(fake, parsed(["q", "k=None", "causal=False"])) == []
    assert missing(fake, parsed(["q", "k"])) == ["causal is no parameter"]
    assert missing(fake, parsed(["q", "k", "causal=True"])) == ["causal is True where it is not passed, not False"]
    assert missing(fake, parsed(["q", "qv", "k", "causal=False"])) == ["k is not at place 1", "qv must be passed"]
    (changed,) = missing(fake, parsed(["q", "k", "*", "causal=False"]))
    assert changed.startswith("causal is keyword-only")


SOURCE = """
import torch
from typing import overload

@overload
def call(q): ...
def call(q, /, scale=1.0, *rest, dtype=torch.float32, **more): ...
def outer():
    def call(wrong): ...
if torch:
    class Wrapper:
        def run(self, x, *, out=None): ...
"""


def test_the_script_reads_a_source_without_importing_it(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "scripts" / "signatures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tree = ast.parse(SOURCE)
    assert script.parameters(script.found(tree, "call")) == [
        *("q", "/", "scale=1.0", "*rest", "dtype=torch.float32", "**more"),
    ]
    assert script.parameters(script.found(tree, "Wrapper.run")) == ["x", "*", "out=None"]
    assert script.found(tree, "Wrapper.call") is None
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "rmsnorm.py").write_text(
        "import nowhere\ndef rmsnorm(x): ...\ndef rmsnorm_fwd(x, eps=1e-6): ...\n"
    )
    assert script.signatures("quack", script.reader(tmp_path)) == {
        "quack.rmsnorm.rmsnorm_fwd": ["x", "eps=1e-06"],
        "quack.rmsnorm.rmsnorm": ["x"],
    }
    (tmp_path / "quack" / "rmsnorm.py").write_text("def rmsnorm(x): ...\n")
    with pytest.raises(SystemExit, match="none of quack/rmsnorm.py has rmsnorm_fwd"):
        script.signatures("quack", script.reader(tmp_path))
