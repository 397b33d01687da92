"""vLLM with LayerZero's attention answers as with its own. Only where vLLM is installed, with its kernels for CPUs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import installed_package
import pytest

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed: tests/integrations/test_vllm.py runs the plugin without it", allow_module_level=True
    )

import torch
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("this vLLM is not built for CPUs", allow_module_level=True)

from layerzero.integrations import vllm as plugin

WITH_IR = pytest.mark.skipif(importlib.util.find_spec("vllm.ir") is None, reason="this vLLM has no IR")


def test_everything_that_vllm_asks_for_is_there() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    backend = AttentionBackendEnum[plugin.name()].get_class()
    for owner in (backend, backend.get_impl_cls(), backend.get_builder_cls()):
        assert not owner.__abstractmethods__
    assert AttentionBackendEnum[backend.get_name()].get_class() is backend


def test_vllm_is_told_what_is_not_served() -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    backend = AttentionBackendEnum[plugin.name()].get_class()
    parameters = inspect.signature(backend.validate_configuration).parameters
    given: dict[str, Any] = {name: False for name in parameters if name.startswith(("use_", "has_"))}
    given |= {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    given |= {"attn_type": "decoder", "device_capability": DeviceCapability(9, 0)}
    assert backend.validate_configuration(**given) == []
    for wrong in ({"kv_cache_dtype": "fp8"}, {"use_mla": True}, {"has_sink": True}, {"attn_type": "encoder_only"}):
        assert len(backend.validate_configuration(**{**given, **wrong})) == 1, wrong


@WITH_IR
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_norms_are_within_vllms_own_tolerance(name: str, dtype: torch.dtype) -> None:
    from vllm import ir

    plugin.register()
    op = getattr(ir.ops, name)
    given = op.generate_inputs(num_tokens=33, hidden_size=256, dtype=dtype)
    impl = op.impls[plugin.PROVIDER]
    assert impl.supports_args(*given)
    torch.testing.assert_close(impl.impl_fn(*given), op.impls["native"].impl_fn(*given), **op.get_tolerance(dtype))


@WITH_IR
def test_norms_are_traced_into_vllms_graphs() -> None:
    """vLLM's lowering traces a provider's function with tensors that have no memory."""
    from torch._inductor.pattern_matcher import fwd_only
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm import ir

    plugin.register()
    impl = ir.ops.fused_add_rms_norm.impls[plugin.PROVIDER]
    with FakeTensorMode():
        given = [torch.empty(7, 64), torch.empty(7, 64), torch.empty(64)]
        traced = fwd_only(lambda *x: impl.func_impl_fn(*x, 1e-5), given, run_functional_passes=False)
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert targets[0] == "layerzero.fused_add_rms_norm.default"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package's entry points, as an installed package has them, and the models."""
    folder = tmp_path_factory.mktemp("vllm")
    installed_package.entry_points(folder)
    return folder


@cache
def _engine(place: Path, model: str, arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "support" / "vllm_engine.py"), str(place), model, arguments]
    done = subprocess.run(
        command, env=installed_package.environment(place), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


#: Grouped heads; sliding windows; windows in every second layer and softcap.
@pytest.mark.parametrize("model", ["Llama", "Mistral", "Gemma2"])
def test_answers_are_those_of_vllms_own_attention(place: Path, model: str) -> None:
    plugin.register()
    own = _engine(place, model, "{}")
    ours = _engine(place, model, json.dumps({"attention_backend": plugin.name()}))
    assert own["ops"] == []
    assert {"kv_cache.append", "attention.gqa.decode.paged", "attention.gqa.prefill.paged"} <= set(ours["ops"])
    assert ours["tokens"] == own["tokens"] and len({token for one in own["tokens"] for token in one}) > 20
    # Prompts with a common beginning find its full pages.
    assert ours["cached"] == own["cached"] and max(ours["cached"]) == 64


@WITH_IR
def test_norms_of_vllms_ir_are_provided(place: Path) -> None:
    own = _engine(place, "Llama", "{}")
    first = {"rms_norm": ["layerzero"], "fused_add_rms_norm": ["layerzero"]}
    ours = _engine(place, "Llama", json.dumps({"ir_op_priority": first}))
    assert ours["ops"] == ["norm.fused_add_rms", "norm.rms"] and ours["tokens"] == own["tokens"]
