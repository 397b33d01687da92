"""The examples of specification 000 §6, §8.3 and appendix B (policy and configuration), as written there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from described import command, registered
from layerzero import _native, backend_files, loading
from torch import Tensor, nn

FLASH = "flash_attn.v3"
#: Libraries that the specification prefers, avoids and locks, by the backends that have their causal attention.
BACKENDS = ("flash_attn_3", "flashinfer_prefill", "xformers")

#: The specification has the names of before, which warn.
SPEC_NAMES = pytest.mark.filterwarnings("ignore:lz.(un)?lock is now:DeprecationWarning")


def for_the_cpu(backend: str) -> dict[str, Any]:
    """A library's own document, with all its names; its kernels for dense attention run on the CPU, in float32."""
    document: dict[str, Any] = json.loads((backend_files.folder(backend) / "capabilities.json").read_text())
    kernels = document["ops"]["attention"]
    for kernel in kernels:
        for key in ("min_sm", "max_sm", "requires", "jit", "workspace_bytes", "supported_generations"):
            kernel.pop(key, None)
        kernel["conditions"] = [text for text in kernel.get("conditions", ()) if "sm" not in text]
        kernel |= {"dtypes": ["float32"], "requires_layouts": ["BSHD"]}
    return {**document, "platform": "cpu", "requires": [], "ops": {"attention": kernels}}


@pytest.fixture
def flash_attention() -> Iterator[list[str]]:
    """The libraries that the specification prefers, avoids and locks; their kernels note that they ran."""
    ran: list[str] = []

    def function(kernel_id: str) -> Callable[..., Tensor]:
        def kernel(
            query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, causal: bool = True
        ) -> Tensor:
            ran.append(kernel_id)
            heads_first = [t.transpose(1, 2) for t in (query, key, value)]
            given = {"is_causal": causal, "scale": scale, "enable_gqa": True}
            return nn.functional.scaled_dot_product_attention(*heads_first, **given).transpose(1, 2)

        return kernel

    lz.list_kernels()
    documents = [for_the_cpu(backend) for backend in BACKENDS]
    for document in documents:
        lz.register_backend(document, {k["kernel_id"]: function(k["kernel_id"]) for k in document["ops"]["attention"]})
    yield ran
    lz.reset()
    for backend in BACKENDS:
        loading._load_builtin(backend)


@pytest.fixture
def heads_of_64() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)


@SPEC_NAMES
def test_programmatic_configuration(heads_of_64: tuple[Tensor, Tensor, Tensor], flash_attention: list[str]) -> None:
    """§6.3."""
    q, k, v = heads_of_64
    # Configure at startup
    lz.configure(
        prefer_sources=["flash_attn"],
        avoid_sources=["xformers"],
        fallback_enabled=True,
        log_selections=True,
    )
    lz.attention(q, k, v, layout="BSHD")
    assert flash_attention.pop() == FLASH

    # Lock a kernel
    lz.lock("attention.causal", "flash_attn.v3.causal")
    lz.attention(q, k, v, layout="BSHD")
    assert flash_attention.pop() == FLASH and lz.explain("attention.causal", q, k, v).basis == "locked"

    # Unlock
    lz.unlock("attention.causal")

    # Temporary override (context manager)
    lz.configure(prefer_sources=[], avoid_sources=["xformers", "torch", "flash_attn", "lz_cpu"])
    with lz.prefer("flashinfer"):
        output = lz.attention(q, k, v, layout="BSHD")
    assert flash_attention.pop().startswith("flashinfer.") and output.shape == q.shape


@SPEC_NAMES
def test_configuration(
    heads_of_64: tuple[Tensor, Tensor, Tensor],
    flash_attention: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """§8.3, with the file of §6.1 as written there."""
    q, k, v = heads_of_64
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layerzero.yaml").write_text(POLICY)
    # Load config from file
    lz.load_config("layerzero.yaml")
    try:
        assert lz.explain("attention.causal", q, k, v).basis == "locked"
        lz.attention(q, k, v, layout="BSHD")
        assert flash_attention.pop() == FLASH
        rules = [setting for setting in lz.settings() if setting.key.startswith("rules[")]
        assert len(rules) == 2 and rules[1].value == {"match": {"seq_len": ">16384"}, "avoid_sources": ["xformers"]}

        # Programmatic config
        lz.configure(
            prefer_sources=["flash_attn"],
            avoid_sources=["xformers"],
            fallback_enabled=True,
            deterministic=False,
            log_selections=False,
            strict_mode=False,
            plan_mode=False,
            allow_adaptation=True,
            graph_strict_mode=False,
            backend_isolation="in_process",  # or "subprocess"
            memory_headroom_mb=1024,
        )

        # Kernel locking
        lz.lock("attention.causal", "flash_attn.v3.causal")
        assert lz.which("attention.causal", q, k, v).kernel_id == FLASH
        lz.unlock("attention.causal")
        assert lz.explain("attention.causal", q, k, v).basis == "declared"

        # Context managers
        with lz.prefer("flashinfer"):
            assert "context" in lz.explain("attention.causal", q, k, v).to_dict()["rules"][-2]

        with lz.disabled():
            # Uses fallback only
            assert lz.which("attention.causal", q, k, v).kernel_id.startswith("lz_cpu.ref.")
    finally:
        monkeypatch.undo()
        _native.load_sources()


def test_the_policy_on_a_machine_that_has_the_library(tmp_path: Path) -> None:
    """§6.1 and §6.2 on an H100 with FlashAttention 2 and 3 and xFormers."""
    file = tmp_path / "layerzero.yaml"
    shapes = [word for name in ("query", "key", "value") for word in ("--shape", f"{name}=2x512x16x128")]
    call = ["--op", "attention.causal", "--device", "h100", "--dtype", "float16", "--layout", "BSHD", *shapes]

    def decided(text: str) -> dict[str, Any]:
        file.write_text(text)
        decision: dict[str, Any] = json.loads(command("explain", "--json", "--config", str(file), *call))
        return decision

    with registered("flash_attn", "2.8.3"), registered("flash_attn_3", "3.0.0"), registered("xformers", "0.0.35"):
        decision = decided(POLICY)
        assert (decision["chosen"], decision["basis"]) == (FLASH, "locked")
        rule = {"match": {"sm": ">=90", "operation": "attention.*"}, "prefer": "flash_attn.v3.*"}
        decision = decided(json.dumps({"rules": [rule]}))
        points = {c["kernel_id"]: c["terms"]["policy"] for c in decision["candidates"] if c["terms"]}
        assert points[FLASH] == 20 and points["flash_attn.v2"] == 0
        # Every kernel of §4.2 locks the operation to its library.
        for name in ("flash_attn.v3.causal", "flash_attn.v2.causal", "xformers.causal"):
            chosen = decided(json.dumps({"locks": {"attention.causal": name}}))["chosen"]
            assert chosen.startswith(name.removesuffix(".causal")), name


def test_the_configuration_reference(tmp_path: Path) -> None:
    """Appendix B, as written there."""
    file = tmp_path / "layerzero.yaml"
    file.write_text(REFERENCE)
    before = {setting.key: setting.value for setting in lz.settings()}
    lz.load_config(file)
    try:
        said = {s.key: s for s in lz.settings() if s.origin["layer"] == "project_file"}
        assert len(said) == 16 and said["perfdb.tune_samples"].value == 20
        assert said["prefer_sources"].value == ["flash_attn", "flashinfer", "xformers"]
        # Everything else it says is the default.
        assert {key for key in said if said[key].value != before[key]} == {"prefer_sources"}
    finally:
        _native.load_sources()
        lz.reset()


POLICY = """\
# layerzero.yaml
version: 1

# Global settings
fallback_enabled: true
log_selections: false
explain_enabled: true
strict_mode: false           # Fail instead of adapting when constraints mismatch
plan_mode: false             # Enable plan-aware selection (multi-op)
allow_adaptation: true       # Allow layout/dtype transforms
graph_strict_mode: false     # Validate CUDA-graph safety via dummy capture
backend_isolation: in_process  # or subprocess

# Library preferences
prefer_sources:
  - flash_attn
  - flashinfer

avoid_sources:
  - experimental_lib

# Kernel locks (bypass selection entirely)
locks:
  attention.causal: "flash_attn.v3.causal"   # Always use FA3 for causal attention

# Conditional preferences
rules:
  # Prefer FlashAttention v3 on Hopper
  - match:
      sm: ">=90"
      operation: "attention.*"
    prefer: "flash_attn.v3.*"

  # Avoid xFormers for long sequences (known perf issue)
  - match:
      seq_len: ">16384"
    avoid_sources:
      - xformers
"""

REFERENCE = """\
# layerzero.yaml - Full configuration reference
version: 1

# Enable/disable LayerZero (use fallbacks when disabled)
enabled: true

# Always have a working fallback
fallback_enabled: true

# Log kernel selections (for debugging)
log_selections: false

# Require deterministic kernels
deterministic: false

# Strict mode disables implicit layout/dtype adaptation
strict_mode: false

# Enable plan-aware selection (multi-op planner)
plan_mode: false

# Allow layout/dtype transforms when needed
allow_adaptation: true

# Memory headroom for selection (MB)
memory_headroom_mb: 1024

# Library preferences (in order)
prefer_sources:
  - flash_attn
  - flashinfer
  - xformers

# Libraries to avoid
avoid_sources: []

# Explicit kernel locks
locks: {}
  # attention.causal: flash_attn.v3.causal

# PerfDB settings
perfdb:
  enabled: true
  path: ~/.cache/layerzero/perfdb.sqlite
  auto_tune: false
  tune_samples: 20

# Selection cache settings
cache:
  enabled: true
  max_size: 10000

# Conditional rules
rules: []
"""
