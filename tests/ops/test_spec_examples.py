"""The examples of specification 000 §7.6, §8.1, §8.2, §8.4, §12.3 and appendix A, as written there, on tensors of the CPU."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from torch import Tensor, nn

# §8.1: names, order and defaults of what the specification shows. More arguments may follow, by name or by position.
SIGNATURES: dict[str, dict[str, Any]] = {
    "attention": {"query": ..., "key": ..., "value": ..., "causal": True, "scale": None},
    "paged_attention": {
        "query": ...,
        "key_cache": ...,
        "value_cache": ...,
        "block_tables": ...,
        "context_lens": ...,
        "scale": None,
    },
    "rms_norm": {"input": ..., "weight": ..., "eps": 1e-6},
    "layer_norm": {"input": ..., "normalized_shape": ..., "weight": None, "bias": None, "eps": 1e-5},
    "rope": {"input": ..., "cos": ..., "sin": ..., "interleaved": False},
    "sample_topk": {"logits": ..., "k": ...},
    "sample_topp": {"logits": ..., "p": ...},
    "quantize": {"input": ..., "dtype": ..., "scale": ...},
    "tokenize": {"texts": ..., "tokenizer_id": ..., "return_offsets": False},
    "detokenize": {"tokens": ..., "tokenizer_id": ...},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_as_the_specification_shows_them(name: str) -> None:
    given = list(inspect.signature(getattr(lz, name)).parameters.values())
    for parameter, (wanted, default) in zip(given, SIGNATURES[name].items(), strict=False):
        assert parameter.name == wanted and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if default is not ...:
            assert parameter.default == default
    assert len(given) >= len(SIGNATURES[name])


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """Grouped-query attention in a small size."""
    torch.manual_seed(0)
    return torch.randn(2, 16, 8, 32), torch.randn(2, 16, 2, 32), torch.randn(2, 16, 2, 32)


# --- §8.1 Core Operations ---------------------------------------------------------------------------------------------


def test_tokenization(tmp_path: Path) -> None:
    small = pytest.importorskip("small_tokenizers")
    small.gpt2_like().save(str(tmp_path / "tokenizer.json"))
    tokenizer_id = str(tmp_path)
    # Tokenization
    tokens = lz.tokenize(
        ["hello world", "a text"],  # list[str] or str
        tokenizer_id,
        return_offsets=False,
    )
    text = lz.detokenize(
        tokens["input_ids"],  # list[int] or list[list[int]]
        tokenizer_id,
    )
    assert isinstance(tokens, dict) and text == ["hello world", "a text"]
    one = lz.tokenize("hello world", tokenizer_id, return_offsets=True)
    assert lz.detokenize(one["input_ids"], tokenizer_id) == "hello world"
    pieces = [lz.detokenize([token], tokenizer_id) for token in one["input_ids"]]
    assert ["hello world"[start:end] for start, end in one["offsets"]] == pieces
    # "LayerZero must resolve `tokenizer_id` to a concrete tokenizer and compute" its hashes "for cache validity".
    assert {k.kernel_id: k.priority for k in lz.list_kernels("tokenize.encode")} == {
        "tokenizers.encode": 60,
        "tiktoken.encode": 70,
        "sentencepiece.encode": 50,
    }


def test_attention(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = qkv
    output = lz.attention(query, key, value, causal=True, scale=None)
    assert output.shape == query.shape
    heads_first = [t.transpose(1, 2) for t in qkv]
    wanted = nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    # "(B, S, H, D) or (B, H, S, D)"
    torch.testing.assert_close(lz.attention(*heads_first, layout="BHSD"), wanted, rtol=1e-5, atol=1e-5)


def test_paged_attention() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 1, 8, 32)
    key_cache, value_cache = torch.randn(6, 4, 2, 32), torch.randn(6, 4, 2, 32)
    block_tables = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    context_lens = torch.tensor([5, 11], dtype=torch.int32)
    output = lz.paged_attention(query, key_cache, value_cache, block_tables, context_lens, scale=None)
    assert output.shape == query.shape
    for b in range(2):
        length = int(context_lens[b])
        keys = key_cache[block_tables[b].long()].view(-1, 2, 32)[:length]
        values = value_cache[block_tables[b].long()].view(-1, 2, 32)[:length]
        wanted = lz.attention(query[b : b + 1], keys[None], values[None], causal=False, layout="BSHD")
        torch.testing.assert_close(output[b : b + 1], wanted, rtol=1e-5, atol=1e-5)


def test_norms() -> None:
    input, weight, bias = torch.randn(2, 5, 16), torch.randn(16), torch.randn(16)
    output = lz.rms_norm(input, weight, eps=1e-6)
    torch.testing.assert_close(output, nn.functional.rms_norm(input, (16,), weight, 1e-6))
    output = lz.layer_norm(input, (16,), weight=None, bias=None, eps=1e-5)
    torch.testing.assert_close(output, nn.functional.layer_norm(input, (16,)))
    output = lz.layer_norm(input, normalized_shape=(16,), weight=weight, bias=bias)
    torch.testing.assert_close(output, nn.functional.layer_norm(input, (16,), weight, bias))
    # "(D,) or tuple"
    output = lz.layer_norm(input, (5, 16))
    torch.testing.assert_close(output, nn.functional.layer_norm(input, (5, 16)), rtol=1e-5, atol=1e-5)


def test_positional_encodings() -> None:
    input = torch.randn(2, 7, 4, 8)
    angles = torch.outer(torch.arange(7.0), 10_000.0 ** (-torch.arange(4) / 4))
    cos, sin = angles.cos(), angles.sin()
    output = lz.rope(input, cos, sin, interleaved=False)
    first, second = input[..., :4], input[..., 4:]
    turn, lift = cos[:, None], sin[:, None]
    wanted = torch.cat([first * turn - second * lift, second * turn + first * lift], -1)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    output = lz.rope(input, cos, sin, interleaved=True)
    even, odd = input[..., ::2], input[..., 1::2]
    wanted = torch.stack([even * turn - odd * lift, odd * turn + even * lift], -1).flatten(-2)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_sampling() -> None:
    logits = torch.randn(3, 50)
    torch.manual_seed(0)
    next_ids = lz.sample_topk(logits, k=5)
    assert next_ids.shape == (3,) and next_ids.dtype == torch.int64
    assert all(next_ids[i] in logits[i].topk(5).indices for i in range(3))
    torch.manual_seed(0)
    assert torch.equal(lz.sample_topk(logits, 5), next_ids)
    next_ids = lz.sample_topp(logits, p=0.5)
    p, order = logits.softmax(-1).sort(-1, descending=True)
    kept = p.cumsum(-1) - p < 0.5
    assert all(next_ids[i] in order[i][kept[i]] for i in range(3))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "mxfp4"])
@pytest.mark.filterwarnings("ignore::layerzero.errors.LayerZeroWarning")
def test_quantization(dtype: str) -> None:
    input = torch.randn(4, 64)
    blocks = {"granularity": "blockwise"} if dtype == "mxfp4" else {}
    chosen = lz.quantize(input, dtype, **blocks)
    qt = lz.quantize(input, dtype, scale=chosen.scales, **blocks)
    assert isinstance(qt, Tensor) and torch.equal(qt.view(torch.uint8), chosen.values.view(torch.uint8))
    packed = {"format": dtype} if dtype == "mxfp4" else {}
    restored = lz.dequantize(qt, chosen.scales, **blocks, **packed)
    assert restored.shape == input.shape and (restored - input).abs().max() < 1.0


# --- §8.2 Inspection and Debugging ------------------------------------------------------------------------------------


# The specification reads answers as dicts, which warns.
@pytest.mark.filterwarnings("ignore:Selection is no dict any more:DeprecationWarning")
def test_inspection(qkv: tuple[Tensor, Tensor, Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = qkv
    info = lz.which(
        "attention.causal",
        q, k, v,  # Or provide explicit context
    )  # fmt: skip
    assert info["kernel_id"].startswith(("torch.sdpa.", "lz_cpu.attention.")) and info["score"] > 0

    report = lz.explain(
        "attention.causal",
        q, k, v,
    )  # fmt: skip
    assert isinstance(report, lz.SelectionReport)
    assert {c.kernel_id for c in report.candidates} >= {"torch.sdpa.flash", "lz_cpu.ref.attention.gqa.prefill"}
    assert any(c.score is not None for c in report.candidates) and any(c.reasons for c in report.candidates)

    kernels = lz.list_kernels("attention.causal")
    assert info["kernel_id"] in {kernel.kernel_id for kernel in kernels}

    valid, reasons = lz.validate(info["kernel_id"], q, k, v)
    assert valid and reasons == []

    lz.doctor()
    said = capsys.readouterr().out
    assert "torch" in said and "cpu" in said


def test_validation_of_a_kernel_for_a_gpu(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """FlashAttention 3's, by the name the specification gives it: its library comes along as a description."""
    q, k, v = qkv
    valid, reasons = lz.validate("flash_attn.v3.causal", q, k, v)
    assert not valid and "PLATFORM_MISMATCH" in {reason.code for reason in reasons}
    aliases = {alias for kernel in lz.list_kernels("attention.causal") for alias in kernel.aliases}
    # xFormers comes along where `backends.unproven` names it.
    named = {"flash_attn.v3.causal", "flash_attn.v2.causal", "flashinfer.causal"}
    assert aliases >= {*named, "torch.sdpa.causal"}


def test_readiness() -> None:
    report = lz.readiness_check()
    # "Validates dispatch table, caches, and capabilities schemas"
    checks = {check.name: check for check in report.checks}
    assert {"dispatch_table", "capabilities", "configuration", "memory", "breakers", "telemetry"} <= set(checks)
    assert checks["capabilities"].status in ("pass", "warn") and checks["dispatch_table"].status == "skipped"
    assert report.ready and bool(report) and "ready" in str(report)


# --- §12.3 Direct Usage -----------------------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """As the specification writes it, with the names it leaves open."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.norm = lambda x: lz.rms_norm(x, self.norm_weight)
        self.norm_weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        B, S, _ = x.shape
        residual = x
        x = self.norm(x)

        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)

        # Reshape to (B, S, H, D)
        q = q.view(B, S, self.num_heads, self.head_dim)
        k = k.view(B, S, self.num_heads, self.head_dim)
        v = v.view(B, S, self.num_heads, self.head_dim)

        attn_out = lz.attention(q, k, v, causal=True)

        attn_out = attn_out.view(B, S, -1)
        return residual + self.o_proj(attn_out)


def test_direct_usage() -> None:
    torch.manual_seed(0)
    block, x = TransformerBlock(32, 4), torch.randn(2, 9, 32)
    block(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    with torch.no_grad():
        # What comes later does not change what came before.
        torch.testing.assert_close(block(x)[:, :5], block(x[:, :5]), rtol=1e-5, atol=1e-5)


# --- Appendix A: Quick Start ------------------------------------------------------------------------------------------


def test_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    q = torch.randn(2, 1024, 32, 128, device="cpu", dtype=torch.bfloat16)
    k = torch.randn(2, 1024, 8, 128, device="cpu", dtype=torch.bfloat16)
    v = torch.randn(2, 1024, 8, 128, device="cpu", dtype=torch.bfloat16)

    # LayerZero automatically selects the best kernel
    output = lz.attention(q, k, v, causal=True)

    # Check what was selected
    print(lz.which("attention.causal", q, k, v))

    assert output.shape == q.shape and output.dtype == torch.bfloat16
    # Which kernel it is depends on the CPU: one for AMX where there is AMX, else torch's.
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    accepted = {c.kernel_id for c in lz.explain("attention.causal", q, k, v).candidates if c.accepted}
    assert printed["kernel_id"] in accepted and "torch.sdpa.flash" in accepted
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)


# --- §7.6 Tuning Mode, §8.4 Warmup and Baking ---------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[None]:
    """A database of the test's own."""
    lz.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    lz.reset()


@pytest.mark.usefixtures("measured")
def test_tuning() -> None:
    report = lz.tune(
        operation="attention.causal",
        dtype=torch.bfloat16,
        head_dim=16,
        seq_lens=[8, 32],
        batch_sizes=[1, 2],
        samples=20,
        heads=2,
        kv_heads=2,
    )
    assert len(report.tuned) == 4 and not report.left
    lz.configure(auto_tune_on_warmup=True, tune_samples=10)
    shapes = [(1, 16, 2, 16)]
    lz.warmup(operation="attention.causal", shapes=shapes, dtype=torch.float16)
    assert lz.explain("attention.causal", *[torch.zeros(1, 16, 2, 16, dtype=torch.float16)] * 3).basis == "measured"


def test_warmup() -> None:
    report = lz.warmup(operation="attention.causal", shapes=[(1, 64, 4, 32), (1, 128, 4, 32)], dtype=torch.float16)
    assert not report.failed


class Tiny(nn.Module):
    """A model that knows what it is called with, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 64)
        self.dummy_inputs = {"x": torch.zeros(1, 8, 32)}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.norm(x))
        return y


@torch.no_grad()
def test_baking() -> None:
    """§8.4, §5.7, §5.8."""
    torch.manual_seed(0)
    model, x = TransformerBlock(32, 4), torch.randn(2, 9, 32)
    # Bake selections for static workloads
    plan = lz.decide(model)
    wanted = model(x)
    assert torch.equal(plan(x), wanted) and torch.equal(plan(x), wanted)
    assert {decision.op.partition(".")[0] for decision in plan.decisions} == {"attention", "norm"}
    # "Baked plans must be decision trees, not single kernels", "fallback to runtime selection"
    tree = lz.decide(model, x, shape_buckets={"seq_len": [8, 64]})
    data = tree.table.to_dict()
    assert len({json.dumps(bucket["bucket"]) for bucket in data["plans"]}) > 1
    assert data["fallback"] == {"mode": "runtime_select"} and torch.equal(tree(x), wanted)
    torch.testing.assert_close(tree(torch.cat([x] * 9, 1))[:, :9], wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_dry_run_and_solve() -> None:
    model = Tiny()
    report = lz.dry_run(model)
    assert [call.op for call in report.calls] == ["norm.layer", "mlp.linear"]
    assert all(call.kernel_id for call in report.calls)
    dispatch_table = lz.solve(model, shape_buckets={"seq_len": [128, 512, 2048, 8192]}, compile_jit=True)
    data = dispatch_table.to_dict()
    # Appendix E.
    assert data["schema_version"] == "1.0" and data["fallback"] == {"mode": "runtime_select"}
    assert data["shape_buckets"]["seq_len"] == [128, 512, 2048, 8192]
    assert len({json.dumps(plan["bucket"]) for plan in data["plans"]}) > 1, "a tree, not a single kernel"
    assert {op["op"] for plan in data["plans"] for op in plan["ops"]} == {"norm.layer", "mlp.linear"}
    assert data["hardware_signature"]
