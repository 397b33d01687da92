"""`lz.optimize`: the model's own results by LayerZero's operations, and the model as it was afterwards."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import layerzero as lz
import pytest
import torch
import transformers
from layerzero.integrations.models import replacing, rotary_functions
from torch import nn
from transformers_models_built import DECODERS, OTHERS, decoder, randomized, tokens

CLOSE = 2e-5
pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def counts(report: Any) -> dict[str, int]:
    """How many parts each operation serves."""
    found: dict[str, int] = {}
    for one in report.replaced:
        found[one.operation] = found.get(one.operation, 0) + one.count
    return found


def state(model: nn.Module) -> list[Any]:
    """What a module has besides its parameters: changes of `optimize` show."""
    held = [(name, sorted(vars(module)), type(module)) for name, module in model.named_modules()]
    return [held, model.config._attn_implementation]


@pytest.mark.parametrize("name", sorted(DECODERS))
@torch.no_grad()
def test_the_model_gives_the_same_and_is_the_same_afterwards(name: str) -> None:
    model, ids = decoder(name, "eager"), tokens(2, 16)
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before, text = model(ids).logits, model.generate(ids, attention_mask=padding, **how)
    was = state(model)
    with lz.patched(model) as optimized:
        assert sum(counts(optimized.report).values()) > 0
        assert state(model) != was
        inside = model(ids).logits
        assert torch.equal(model.generate(ids, attention_mask=padding, **how), text)
    assert float((inside - before).abs().max()) < CLOSE
    assert state(model) == was
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("bert", {"layer_norm", "gelu", "attention"}),
        ("t5", {"rms_norm", "gelu", "attention"}),
        ("whisper", {"layer_norm", "gelu", "attention"}),
        ("vit", {"layer_norm", "gelu", "attention"}),
    ],
)
@torch.no_grad()
def test_other_models_give_the_same(name: str, operations: set[str]) -> None:
    (config, kind), given = OTHERS[name]()
    torch.manual_seed(0)
    model = randomized(kind._from_config(config, attn_implementation="eager"))
    before, was = model(**given).logits, state(model)
    with lz.patched(model) as optimized:
        assert set(counts(optimized.report)) == operations
        after = model(**given).logits
    where = given["attention_mask"][..., None] if name == "bert" else 1
    assert float(((after - before) * where).abs().max()) < CLOSE
    assert state(model) == was


def test_the_report_of_a_llama() -> None:
    model = decoder("llama", "sdpa")
    optimized = lz.optimize(model)
    expected = {"rms_norm": 5, "silu_mul": 2, "attention": 2, "rope": 1, "fused_add_rms_norm": 2}
    assert counts(optimized.report) == expected
    assert {kept.name for kept in optimized.report.kept} == {"Linear", "Embedding", "sampling"}
    assert model.config._attn_implementation == "layerzero"
    text = str(optimized.report)
    assert "5x   LlamaRMSNorm" in text
    assert "lz.fused_add_rms_norm" in text
    assert "expected gain: " in text
    assert optimized.report.to_dict()["model"] == "LlamaForCausalLM"
    optimized.undo()
    optimized.undo()
    assert model.config._attn_implementation == "sdpa"


def test_only_what_was_asked_for() -> None:
    model = decoder("llama", "sdpa")
    with lz.patched(model, only=("norms",)) as optimized:
        assert counts(optimized.report) == {"rms_norm": 5}
        assert model.config._attn_implementation == "sdpa"
    with pytest.raises(lz.ConfigurationError, match=r"no part 'speed'"):
        lz.optimize(model, only=("speed",))
    with pytest.raises(lz.ArgumentTypeError, match=r"the model is a str"):
        lz.optimize("gpt2")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(transformers, "ContinuousBatchingConfig"), reason="its older form needs a GPU")
@torch.no_grad()
def test_continuous_batching_with_everything_but_attention() -> None:
    model = decoder("llama", "sdpa")
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=-1)
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)

    def generated() -> list[list[int]]:
        requests = [tokens(1, length)[0].tolist() for length in (14, 9, 3)]
        results = model.generate_batch(
            inputs=requests, generation_config=config, continuous_batching_config=small, progress_bar=False
        )
        return [results[key].generated_tokens for key in sorted(results)]

    before = generated()
    assert [len(text) for text in before] == [5, 5, 5]
    with lz.patched(model, only=("norms", "activations", "rope", "residuals"), fuse_qkv=True) as optimized:
        assert counts(optimized.report)["rms_norm"] == 5
        assert generated() == before
    # transformers accepts only its own names there.
    lz.register_with_transformers()
    model.set_attn_implementation("layerzero")
    with pytest.raises(ValueError, match="layerzero is not supported for continuous batching"):
        generated()


@torch.no_grad()
def test_attention_with_sinks_is_switched_and_experts_are_listed_as_they_were() -> None:
    model, ids = decoder("gpt_oss", "eager"), tokens(1, 8)
    right = model(ids).logits
    with lz.patched(model) as optimized:
        assert model.config._attn_implementation == "layerzero"
        assert (model(ids).logits - right).abs().max() < 2e-5
        kept = {one.name: one.why for one in optimized.report.kept}
    assert "GptOssAttention" not in kept
    assert "experts" in kept["GptOssExperts"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_gradients_are_the_models_own(name: str) -> None:
    ids = tokens(2, 10)
    gradients = []
    for optimized in (False, True):
        model = decoder(name, "eager").train()
        done = lz.optimize(model) if optimized else None
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        if done is not None:
            done.undo()
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or float((a - b).abs().max()) < 2e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
@torch.no_grad()
def test_bfloat16_differs_by_rounding(name: str) -> None:
    model, ids = decoder(name, "eager", torch.bfloat16), tokens(2, 16)
    right = decoder(name, "eager", torch.float64)
    right.load_state_dict(model.state_dict())
    exact, before = right(ids).logits, model(ids).logits.double()
    with lz.patched(model):
        after = model(ids).logits.double()
    assert after.dtype == torch.float64
    # As near the exact result as the model itself is, give or take.
    assert float((after - exact).abs().mean()) < 1.5 * float((before - exact).abs().mean())


@torch.no_grad()
def test_compiled_as_one_graph() -> None:
    model, ids = decoder("llama", "eager"), tokens(2, 12)
    before = model(ids).logits
    torch.compiler.reset()
    with lz.patched(model):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert float((compiled(ids).logits - before).abs().max()) < CLOSE
    torch.compiler.reset()


@torch.no_grad()
def test_a_copy_of_an_optimized_model_is_a_model_of_its_own() -> None:
    model, ids = decoder("gemma3", "eager"), tokens(2, 12)
    before = model(ids).logits
    with lz.patched(model):
        other = copy.deepcopy(model)
        norm = other.model.layers[0].input_layernorm
        assert norm.forward.__self__ is norm
        # A weight that changes is seen.
        other.model.norm.weight.mul_(2.0).add_(1.0)
        assert float((model(ids).logits - before).abs().max()) < CLOSE
        changed = other(ids).logits
        model.model.norm.weight.mul_(2.0).add_(1.0)
        assert torch.allclose(model(ids).logits, changed, atol=1e-5)
    assert torch.allclose(model(ids).logits, changed, atol=1e-4)


# Which modules are replaced.


class ScaledNorm(nn.Module):
    """Looks like an RMS norm and is another function of its weight, the same for a weight of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight**2


class RMSNorm(ScaledNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GatedNorm(RMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (1 if gate is None else gate)


def test_a_norm_that_computes_something_else_is_kept() -> None:
    assert isinstance(replacing.match(ScaledNorm()), str)
    assert "something else" in str(replacing.match(ScaledNorm()))
    assert "more than one argument" in str(replacing.match(GatedNorm()))
    found = replacing.match(RMSNorm())
    assert isinstance(found, replacing.Match)
    assert found.operation == "rms_norm"
    assert "meta" in str(replacing.match(RMSNorm().to("meta")))


class SwiGLU(nn.Module):
    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = nn.SiLU()
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(up) * gate if self.swapped else self.act_fn(gate) * up)


def test_an_mlp_is_compared_before_it_is_replaced() -> None:
    torch.manual_seed(0)
    assert isinstance(replacing.match(SwiGLU()), replacing.Match)
    assert "something else" in str(replacing.match(SwiGLU(swapped=True)))


# What a comparison of usual numbers outside of training does not show.


class LimitedSwiGLU(SwiGLU):
    """With a limit that usual numbers do not reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=50)) * self.up_proj(x))


class HiddenLimit(SwiGLU):
    """The same, without a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate * (gate < 50)) * self.up_proj(x))


class LimitedGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x).clamp(-10, 10)


class EpsilonOutsideRMSNorm(RMSNorm):
    """1 / (sqrt(mean square) + eps), not 1 / sqrt(mean square + eps)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


def test_a_limit_that_usual_numbers_do_not_reach_is_seen() -> None:
    torch.manual_seed(0)
    assert replacing.match(LimitedSwiGLU()) == "a gated MLP that also calls clamp"
    assert "something else" in str(replacing.match(HiddenLimit()))
    assert "something else" in str(replacing.match(LimitedGELU()))
    from transformers.activations import ACT2FN

    assert "something else" in str(replacing.match(nn.Sequential(ACT2FN["gelu_10"])[0]))


def test_a_limit_of_a_model_of_transformers_is_seen() -> None:
    pytest.importorskip("transformers.models.deepseek_v4")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "mlp_bias": False, "hidden_act": "silu"}
    model, x = DeepseekV4MLP(SimpleNamespace(**sizes, swiglu_limit=10.0)).eval(), torch.randn(1, 64) * 60
    with torch.no_grad():
        before = model(x)
        with lz.patched(model):
            assert torch.equal(model(x), before)


def test_another_use_of_epsilon_is_seen() -> None:
    assert "something else" in str(replacing.match(EpsilonOutsideRMSNorm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_an_operation_is_one_in_every_dtype(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    torch.manual_seed(0)
    for module in (LlamaRMSNorm(64), LlamaMLP(DECODERS["llama"]()), nn.LayerNorm(64), nn.GELU()):
        found = replacing.match(module.to(dtype))
        assert isinstance(found, replacing.Match), found


class DroppedSwiGLU(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def test_dropout_stays_in_training() -> None:
    torch.manual_seed(0)
    model, x = DroppedSwiGLU(), torch.randn(40, 8)
    expected = model.eval()(x)
    model.train()
    with lz.optimize(model) as optimized:
        assert counts(optimized.report) == {"silu_mul": 1}
        assert 0.3 < float((model(x) == 0).float().mean()) < 0.7
        model.eval()
        assert torch.allclose(model(x), expected, atol=1e-6)
        # A part in training is enough.
        model.dropout.train()
        assert 0.3 < float((model(x) == 0).float().mean()) < 0.7


def test_a_comparison_leaves_the_mode_of_every_module() -> None:
    model = DroppedSwiGLU().train()
    model.dropout.eval()
    with lz.optimize(model):
        assert model.training
        assert not model.dropout.training


@torch.no_grad()
def test_a_weight_written_through_data_is_seen() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model, x = GemmaRMSNorm(8), torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with lz.optimize(model, only=("norms",)) as optimized:
        assert counts(optimized.report) == {"rms_norm": 1}
        model(x)
        model.weight.data.copy_(torch.full((8,), 3.0))
        after = model(x)
    assert torch.allclose(after, model(x), atol=1e-5)


class ImageRMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, _, _ = x.shape
        return x * self.weight.view(1, channels, 1, 1) / batch


def test_a_module_that_raises_is_listed() -> None:
    with lz.optimize(nn.Sequential(ImageRMSNorm(), nn.LayerNorm(8))) as optimized:
        assert counts(optimized.report) == {"layer_norm": 1}
    kept = {one.name: one.why for one in optimized.report.kept}
    assert "could not be compared: ValueError: not enough values" in kept["ImageRMSNorm"]


@torch.no_grad()
def test_norms_are_undone_before_the_sums_they_are_fused_with() -> None:
    model, ids = decoder("llama", "eager"), tokens(1, 6)
    before = model(ids).logits
    norms, sums = lz.optimize(model, only=("norms",)), lz.optimize(model, only=("residuals",))
    assert counts(sums.report) == {"fused_add_rms_norm": 2}
    norms.undo()
    assert torch.equal(model(ids).logits, before)
    sums.undo()
    assert torch.equal(model(ids).logits, before)


def test_sums_alone_say_why_they_are_not_fused() -> None:
    with lz.optimize(decoder("llama", "eager"), only=("residuals",)) as optimized:
        assert optimized.report.replaced == []
    kept = {one.name: one.why for one in optimized.report.kept}
    assert kept["LlamaDecoderLayer"] == (
        'sum and norm: its post_attention_layernorm does not run lz.rms_norm: replace "norms" too'
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@torch.no_grad()
def test_an_optimized_model_can_be_pickled(name: str) -> None:
    """What is loaded runs the model's own forwards, and can be optimized again."""
    model, ids = decoder(name, "eager"), tokens(1, 6)
    before = model(ids).logits
    with lz.patched(model, only=("norms", "activations", "residuals")) as optimized:
        other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(ids).logits, before)
    with lz.patched(other, only=("norms", "activations", "residuals")) as again:
        assert counts(again.report) == counts(optimized.report)
        assert float((other(ids).logits - before).abs().max()) < CLOSE


def test_the_width_is_that_of_the_operation() -> None:
    torch.manual_seed(0)
    model = SwiGLU()
    model.gate_proj, model.up_proj, model.down_proj = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)
    found = replacing.match(model)
    assert isinstance(found, replacing.Match)
    assert (found.width, found.operated) == (8, 24)
    assert replacing.match(nn.GELU()).operated is None  # type: ignore[union-attr]


def test_any_module_of_torch_can_be_optimized() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), RMSNorm(), SwiGLU(), nn.GELU())
    x = torch.randn(3, 8)
    before = model(x)
    with lz.optimize(model) as optimized:
        assert counts(optimized.report) == {"layer_norm": 1, "rms_norm": 1, "silu_mul": 1, "gelu": 1}
        assert torch.allclose(model(x), before, atol=1e-5)
    assert [kept.why for kept in optimized.report.kept if "attention" in kept.why] == [
        "attention: not a model of transformers or diffusers"
    ]


def test_hooks_of_a_norm_see_their_tensors() -> None:
    """The sum and the norm are fused only while nobody looks at the norm."""
    model, ids = decoder("llama", "eager"), tokens(1, 6)
    seen: list[torch.Tensor] = []
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda module, given, out: seen.append(given[0].clone()))
    with torch.no_grad():
        model(ids)
        with lz.patched(model):
            model(ids)
    assert len(seen) == 2
    assert torch.allclose(seen[0], seen[1], atol=1e-5)


# The rotary function of a file.


def test_the_rotary_function_comes_back_with_the_last_model() -> None:
    from transformers.models.llama import modeling_llama

    theirs = modeling_llama.apply_rotary_pos_emb
    first, second = decoder("llama", "eager"), decoder("llama", "eager")
    one, two = lz.optimize(first, only=("rope",)), lz.optimize(second, only=("rope",))
    ours = modeling_llama.apply_rotary_pos_emb
    assert ours is not theirs
    one.undo()
    assert modeling_llama.apply_rotary_pos_emb is ours
    two.undo()
    assert modeling_llama.apply_rotary_pos_emb is theirs
    assert rotary_functions._taken == {}


@torch.no_grad()
def test_the_rotary_function_calls_the_old_one_for_other_shapes() -> None:
    from transformers.models.llama import modeling_llama

    theirs = modeling_llama.apply_rotary_pos_emb
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 4, 16, generator=generator), torch.randn(2, 5, 2, 16, generator=generator)
    angles = torch.randn(2, 5, 8, generator=generator).repeat(1, 1, 2)
    with lz.patched(decoder("llama", "eager"), only=("rope",)):
        ours = modeling_llama.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
        by_position = modeling_llama.apply_rotary_pos_emb(
            q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()
        )
    expected = theirs(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
    for a, b, c in zip(ours, expected, by_position, strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(c.transpose(1, 2), b, atol=1e-5)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama", "eager")
    was = state(model)

    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(rotary_functions, "take", fails)
    with pytest.raises(RuntimeError, match="no"):
        lz.optimize(model)
    assert state(model) == was
