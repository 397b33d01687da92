"""Writes the signatures of the library functions that adapters call, read from the library's own Python source.

    python scripts/signatures.py flashinfer 0.7.2 SOURCE

SOURCE is a wheel, an sdist, or a folder that has the source: site-packages, or a checkout. Nothing of it is imported, so
neither a GPU nor the library's own requirements are needed. `testdata/signatures/<library>-<version>.json` has, for each
function by its full name, its parameters in order, as Python writes them: `name`, `name=default`, `*` before parameters
that are passed by name only, `*args`, `**kwargs`. `self`, `cls` and `ctx` are left out, because a caller does not pass them.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "testdata" / "signatures"


def methods(wrapper: str) -> tuple[str, ...]:
    """What is called of a wrapper of FlashInfer's."""
    return tuple(f"{wrapper}.{method}" for method in ("__init__", "plan", "run"))


#: By library: the module a caller imports them from, the files that may define them, and the functions and methods that
#: adapters call.
LIBRARIES: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    # It calls a function of ours, and ours stands in for its own: see tests/integrations/test_diffusers_signatures.py.
    "diffusers": (
        (
            "diffusers.models.attention_dispatch",
            ("diffusers/models/attention_dispatch.py",),
            ("_native_attention", "dispatch_attention_fn", "_AttentionBackendRegistry.register"),
        ),
        (
            "diffusers.models.attention_processor",
            ("diffusers/models/attention_processor.py",),
            (
                "Attention.forward",
                "Attention.prepare_attention_mask",
                "Attention.set_processor",
                "AttnProcessor2_0.__call__",
                "FusedAttnProcessor2_0.__call__",
                "JointAttnProcessor2_0.__call__",
            ),
        ),
    ),
    "flash_attn": (
        (
            "flash_attn",
            ("flash_attn/flash_attn_interface.py",),
            ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
        ),
    ),
    "flash_attn_3": (
        (
            "flash_attn_interface",
            ("hopper/flash_attn_interface.py", "flash_attn_interface.py"),
            ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
        ),
    ),
    "flash_attn_4": (
        ("flash_attn.cute", ("flash_attn/cute/interface.py",), ("flash_attn_func", "flash_attn_varlen_func")),
    ),
    "flashinfer": (
        (
            "flashinfer",
            ("flashinfer/prefill.py", "flashinfer/decode.py", "flashinfer/cascade.py", "flashinfer/sparse.py"),
            (
                "single_prefill_with_kv_cache",
                "merge_state_in_place",
                *methods("BatchPrefillWithRaggedKVCacheWrapper"),
                *methods("BatchPrefillWithPagedKVCacheWrapper"),
                *methods("BatchDecodeWithPagedKVCacheWrapper"),
                *methods("MultiLevelCascadeAttentionWrapper"),
                *methods("BlockSparseAttentionWrapper"),
                *methods("VariableBlockSparseAttentionWrapper"),
            ),
        ),
        (
            "flashinfer",
            (
                "flashinfer/norm/__init__.py",
                "flashinfer/rope.py",
                "flashinfer/rope/__init__.py",
                "flashinfer/sampling.py",
            ),
            (
                "rmsnorm",
                "layernorm",
                "apply_rope_with_cos_sin_cache",
                "top_p_sampling_from_probs",
                "top_k_sampling_from_probs",
            ),
        ),
        (
            "flashinfer.mla",
            ("flashinfer/mla/_core.py", "flashinfer/mla/_batch_mla/_wrapper.py"),
            methods("BatchMLAPagedAttentionWrapper"),
        ),
    ),
    "liger": (
        ("liger_kernel.ops.rms_norm", ("liger_kernel/ops/rms_norm.py",), ("LigerRMSNormFunction.forward",)),
        ("liger_kernel.ops.layer_norm", ("liger_kernel/ops/layer_norm.py",), ("LigerLayerNormFunction.forward",)),
        (
            "liger_kernel.ops.fused_add_rms_norm",
            ("liger_kernel/ops/fused_add_rms_norm.py",),
            ("LigerFusedAddRMSNormFunction.forward",),
        ),
        ("liger_kernel.ops.swiglu", ("liger_kernel/ops/swiglu.py",), ("LigerSiLUMulFunction.forward",)),
    ),
    "quack": (("quack.rmsnorm", ("quack/rmsnorm.py",), ("rmsnorm_fwd", "rmsnorm")),),
    "xformers": (("xformers.ops.fmha", ("xformers/ops/fmha/__init__.py",), ("memory_efficient_attention",)),),
    "torchao": (
        (
            "torchao.quantization.quant_primitives",
            ("torchao/quantization/quant_primitives.py",),
            ("dequantize_affine",),
        ),
    ),
    "aiter": (
        (
            "aiter",
            ("aiter/ops/mha.py", "aiter/ops/rmsnorm.py", "aiter/ops/norm.py", "aiter/ops/rope.py"),
            (
                "flash_attn_func",
                "rmsnorm2d_fwd",
                "rmsnorm2d_fwd_with_add",
                "layernorm2d_fwd",
                "rope_cached_fwd",
                "rope_cached_positions_fwd",
            ),
        ),
    ),
    # What the plugin calls.
    "vllm": (
        (
            "vllm.v1.attention.backend",
            ("vllm/v1/attention/backend.py",),
            ("AttentionMetadataBuilder._init_reorder_batch_threshold",),
        ),
        ("vllm.v1.attention.backends.utils", ("vllm/v1/attention/backends/utils.py",), ("split_decodes_and_prefills",)),
        (
            "vllm.v1.attention.backends.registry",
            ("vllm/v1/attention/backends/registry.py",),
            ("register_backend", "AttentionBackendEnum.get_path", "AttentionBackendEnum.is_overridden"),
        ),
        ("vllm.config", ("vllm/config/vllm.py",), ("get_current_vllm_config_or_none",)),
    ),
    # What vLLM calls of the plugin.
    "vllm_backend": (
        (
            "vllm.v1.attention.backend",
            ("vllm/v1/attention/backend.py",),
            (
                "AttentionBackend.get_name",
                "AttentionBackend.get_impl_cls",
                "AttentionBackend.get_builder_cls",
                "AttentionImpl.__init__",
                "AttentionImpl.forward",
                "AttentionMetadataBuilder.__init__",
                "AttentionMetadataBuilder.build",
                "AttentionMetadataBuilder.build_for_cudagraph_capture",
            ),
        ),
    ),
    "vllm_ir": (
        ("vllm.ir.op", ("vllm/ir/op.py",), ("IrOp.register_impl",)),
        ("vllm.ir.ops", ("vllm/ir/ops/layernorm.py",), ("rms_norm", "fused_add_rms_norm")),
    ),
    "sglang": (
        (
            "sglang.srt.layers.attention.attention_registry",
            ("sglang/srt/layers/attention/attention_registry.py",),
            ("register_attention_backend",),
        ),
        (
            "sglang.srt.layers.attention.base_attn_backend",
            ("sglang/srt/layers/attention/base_attn_backend.py",),
            (
                "AttentionBackend.init_forward_metadata",
                "AttentionBackend.init_cuda_graph_state",
                "AttentionBackend.init_forward_metadata_out_graph",
                "AttentionBackend.init_forward_metadata_in_graph",
                "AttentionBackend.get_cuda_graph_seq_len_fill_value",
                "AttentionBackend.forward_decode",
                "AttentionBackend.forward_extend",
            ),
        ),
    ),
    "cudnn": (
        (
            "cudnn",
            ("cudnn/_pygraph.py",),
            ("pygraph.__init__", "pygraph.tensor", "pygraph.sdpa", "pygraph.build", "pygraph.execute"),
        ),
    ),
}
#: Parameters that a caller does not pass.
BOUND = ("self", "cls", "ctx")


def parameters(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function, in order, as Python writes them."""
    given = function.args
    written: list[str] = []
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    for at, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if at == 0 and argument.arg in BOUND:
            continue
        written.append(argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}")
        if at + 1 == len(given.posonlyargs):
            written.append("/")
    if given.vararg is not None:
        written.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        written.append("*")
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        written.append(argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}")
    if given.kwarg is not None:
        written.append(f"**{given.kwarg.arg}")
    return written


def found(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The last definition of a function or method that is no `@overload`. One in a branch or a `try` counts, one inside
    another function does not."""
    scope: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for wanted in classes:
        scope = [
            inner
            for node in statements(scope)
            if isinstance(node, ast.ClassDef) and node.name == wanted
            for inner in node.body
        ]
    matches = [
        node
        for node in statements(scope)
        if isinstance(node, ast.FunctionDef)
        and node.name == function
        and not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return matches[-1] if matches else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block and of its branches, without what is inside functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def reader(source: Path) -> Callable[[str], str | None]:
    """What reads a file of a wheel, an sdist or a folder by its path; None if it has no such file."""
    if source.is_dir():
        return lambda name: (source / name).read_text(encoding="utf-8") if (source / name).is_file() else None
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            contents = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
        return contents.get
    with tarfile.open(source) as archive:
        # An sdist has everything in a folder `<name>-<version>`.
        opened = {entry.name.partition("/")[2]: archive.extractfile(entry) for entry in archive if entry.isfile()}
        wanted = {file for library in LIBRARIES.values() for _, files, _ in library for file in files}
        contents = {name: file.read().decode() for name, file in opened.items() if name in wanted and file is not None}
    return contents.get


def signatures(library: str, read: Callable[[str], str | None]) -> dict[str, list[str]]:
    """The parameters of every function of a library that adapters call, by its full name."""
    written: dict[str, list[str]] = {}
    for module, files, names in LIBRARIES[library]:
        sources = [source for source in map(read, files) if source is not None]
        trees = [ast.parse(source) for source in sources]
        for name in names:
            defined = [function for function in (found(tree, name) for tree in trees) if function is not None]
            if not defined:
                sys.exit(f"none of {', '.join(files)} has {name}: name its file in LIBRARIES of scripts/signatures.py")
            written[f"{module}.{name}"] = parameters(defined[-1])
    return written


def text(library: str, version: str, functions: dict[str, list[str]]) -> str:
    """The file."""
    return json.dumps({"library": library, "version": version, "functions": functions}, indent=1) + "\n"


def main() -> None:
    """Writes one file."""
    parser = argparse.ArgumentParser(description="Writes the signatures of a library's functions.")
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("version")
    parser.add_argument("source", type=Path, help="a wheel, an sdist, or a folder with the source")
    asked = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    made = text(asked.library, asked.version, signatures(asked.library, reader(asked.source)))
    (FOLDER / f"{asked.library}-{asked.version}.json").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
