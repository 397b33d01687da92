"""The calls of transformers models: against what was measured before, and against what the models really run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native, workloads
from layerzero.errors import ConfigurationError
from layerzero.integrations._transformers import models as transformers_models
from layerzero.models import UntraceableModelError
from strategies import SCALE, SCALES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: What the hand-written workloads of the published models were, bound: operation, sizes, parameters, dtypes, count.
BEFORE: dict[str, dict[str, list[list[Any]]]] = json.loads(
    (Path(__file__).parent / "workloads_before.json").read_text(encoding="utf-8")
)
#: What is no longer among the calls of a model, and why.
NO_LONGER = {
    # The router computes in float32.
    ("deepseek-v3", "mlp.linear", 256),
}
FULL = SCALE == SCALES["full"]


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[None]:
    """A performance database of the test's own, and nothing learned after it."""
    lz.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    _native.learn()
    lz.reset()


@pytest.fixture
def library() -> Any:
    """transformers, where it is installed."""
    return pytest.importorskip("transformers", reason="transformers is not installed")


SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {**SIZES, "intermediate_size": 128}
GROUPED = {**MLP, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
SEVERAL = {
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "pad_token_id": 0,
}
#: Small models of each type, and operations their passes must have.
SMALL: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": (GROUPED, {"attention", "norm.rms", "posenc.rope", "activation.silu_mul"}),
    "mistral": ({**HEADS, "sliding_window": 16}, {"attention", "norm.rms", "posenc.rope"}),
    "qwen2": (GROUPED, {"attention", "norm.rms", "posenc.rope"}),
    "qwen3": (HEADS, {"attention", "norm.rms", "posenc.rope"}),
    "gemma2": (HEADS, {"attention", "norm.rms", "activation.gelu"}),
    "gemma3": ({"text_config": HEADS}, {"attention", "norm.rms", "activation.gelu"}),
    "gpt2": (
        {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"attention", "norm.layer", "activation.gelu"},
    ),
    "falcon": (SIZES, {"attention", "norm.layer", "posenc.rope"}),
    "phi3": ({**GROUPED, "pad_token_id": 0}, {"attention", "norm.rms", "posenc.rope"}),
    "mixtral": ({**GROUPED, "num_local_experts": 4}, {"attention", "norm.rms", "activation.silu_mul"}),
    "gpt_oss": ({**HEADS, "num_local_experts": 4}, {"norm.rms", "posenc.rope"}),
    "t5": (
        {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        {"attention", "norm.rms"},
    ),
    "whisper": (SEVERAL, {"attention", "norm.layer", "activation.gelu"}),
    "bart": (SEVERAL, {"attention", "norm.layer", "activation.gelu"}),
    "bert": (MLP, {"attention", "norm.layer", "activation.gelu"}),
    "llama4": (
        {"text_config": {**HEADS, "num_local_experts": 4, "intermediate_size_mlp": 128}},
        {"attention", "norm.rms", "posenc.rope", "activation.silu_mul"},
    ),
    "opt": ({**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}, {"attention", "norm.layer"}),
    "bloom": ({"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, {"attention", "norm.layer"}),
    "deepseek_v3": (
        {
            **MLP,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        {"attention", "attention.mla", "norm.rms", "posenc.rope"},
    ),
    "vit": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
        },
        {"attention", "norm.layer", "activation.gelu"},
    ),
}


def operations(traced: workloads.Traced) -> Counter[str]:
    counts: Counter[str] = Counter()
    for call, count in zip(traced.specs(), traced.counts(), strict=True):
        counts[json.loads(call)["op"]] += count
    return counts


def small(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name, **SMALL[name][0], **changes}


@pytest.mark.parametrize("name", SMALL)
def test_any_type_of_model_is_traced(name: str, library: Any) -> None:
    traced = workloads.of_model(small(name), "bfloat16", [2], [24], [48])
    counts = operations(traced)
    assert counts["mlp.linear"] > 0 and counts.keys() >= SMALL[name][1], counts
    assert traced.share is not None and traced.share.of_flops > 0.8
    for call in traced.specs():
        # Every call is one that can be asked about, and it can be made.
        assert lz.explain_call(call).to_dict()["op"]


def test_tracing_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lz.workload(model=small("gpt2"), batch=[1], seq=[8], context=[8], progress=True)
    assert "gpt2: 0/2 forward passes traced" in capsys.readouterr().err
    lz.workload(model=small("gpt2"), batch=[1], seq=[8], context=[8])
    assert capsys.readouterr().err == ""


def bound(call: str) -> str:
    """Operation, sizes, parameters and dtypes of a call."""
    spec = json.loads(call)
    data = lz.explain_call(spec).to_dict()
    dtypes = {name: tensor["dtype"] for name, tensor in spec["tensors"].items()}
    return same(data["op"], data["dims"], spec.get("params", {}), dtypes)


DEFAULTS = {"norm.rms": {"eps": 1e-6}, "norm.fused_add_rms": {"eps": 1e-6}, "norm.layer": {"eps": 1e-5}}


def same(op: str, dims: dict[str, int], params: dict[str, Any], dtypes: dict[str, str]) -> str:
    plain = {"causal": True} if op.startswith("attention.") and "mla" not in op else DEFAULTS.get(op, {})
    rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in {**plain, **params}.items()}
    return json.dumps([op, dims, rounded, dtypes], sort_keys=True)


def missing(name: str, config: dict[str, Any], counted: bool) -> list[str]:
    """What of the calls from before is not among those of a configuration."""
    lost = []
    long = "sliding_window" in config and config.get("use_sliding_window", True)
    for phase, rows in BEFORE[name].items():
        seq, context = ([48, 4100], [96, 4200]) if long else ([48], [96])
        traced = workloads.of_model(config, "bfloat16", [2], seq, context, [phase])  # type: ignore[list-item]
        have: Counter[str] = Counter()
        for call, count in zip(traced.specs(), traced.counts(), strict=True):
            have[bound(call)] += count
        for op, dims, params, dtypes, count in rows:
            known = (name, op, dims.get("out_features")) in NO_LONGER
            if not known and have[same(op, dims, params, dtypes)] < (count if counted else 1):
                lost.append(f"{phase}: {op} {dims} {params} {count}")
    return lost


@pytest.mark.parametrize("name", BEFORE)
def test_the_calls_of_published_models_are_those_from_before_and_more(name: str, library: Any) -> None:
    config = transformers_models.published()[name]
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    dense = {"first_k_dense_replace": 1} if "first_k_dense_replace" in config else {}
    assert missing(name, config if FULL else {**config, layers: 2, **dense}, counted=FULL) == []


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama-3.2-1b"])
def test_calls_are_counted_as_before(name: str, library: Any) -> None:
    assert missing(name, transformers_models.published()[name], counted=True) == []


class Products(TorchDispatchMode):
    """How many matrix products really run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "made"), [("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
@torch.no_grad()
def test_counts_are_those_of_a_real_model(name: str, made: str, library: Any) -> None:
    config = library.CONFIG_MAPPING[name].from_dict(small(name))
    model = getattr(library, made)(config).eval()
    ids = torch.zeros(2, 24, dtype=torch.int64)
    with Products() as real:
        out = model(ids, logits_to_keep=1)
    with Products() as step:
        model(ids[:, :1], past_key_values=out.past_key_values, logits_to_keep=1)
    for phase, seen in (("prefill", real.counts), ("decode", step.counts)):
        counts = operations(workloads.of_model(config, "float32", [2], [24], [25], [phase]))  # type: ignore[list-item]
        assert counts["mlp.linear"] == seen["addmm"] + seen["mm"]
        assert counts["attention"] == sum(n for op, n in seen.items() if "scaled_dot_product" in op)


def shapes(traced: workloads.Traced, op: str) -> list[dict[str, list[int]]]:
    found = [json.loads(call) for call in traced.calls]
    return [{k: v["shape"] for k, v in call["tensors"].items()} for call in found if call["op"] == op]


def test_a_decode_step_has_a_cache_of_the_context(library: Any) -> None:
    traced = workloads.of_model(small("llama"), None, [3], [8], [40], ["decode"])
    (attention,) = shapes(traced, "attention")
    assert (attention["query"], attention["key"]) == ([3, 4, 1, 16], [3, 2, 40, 16])
    for rope in shapes(traced, "posenc.rope"):
        assert (rope["cos"], rope["positions"]) == ([40, 8], [3, 1])
    assert {rows["input"][0] * rows["input"][1] for rows in shapes(traced, "mlp.linear")} == {3}


def test_an_encoder_is_attended_to_by_its_decoder(library: Any) -> None:
    lengths = lambda phase: {
        (tensors["query"][2], tensors["key"][2])
        for tensors in shapes(workloads.of_model(small("t5"), None, [1], [30], [12], [phase]), "attention")
    }
    assert lengths("prefill") == {(30, 30), (1, 1), (1, 30)}
    assert lengths("decode") == {(1, 12), (1, 30)}


def test_rows_spread_evenly_over_experts(library: Any) -> None:
    traced = workloads.of_model(small("mixtral", num_experts_per_tok=2), None, [1], [10], [16], ["prefill"])
    experts = {
        call: count for call, count in traced.calls.items() if json.loads(call)["tensors"].get("gate", {}).get("shape")
    }
    # 10 tokens, 2 experts each, 4 experts: 5 rows for each of 4, in 2 layers.
    ((call, count),) = experts.items()
    assert (json.loads(call)["tensors"]["gate"]["shape"], count) == ([5, 128], 8)


def test_a_window_is_a_parameter_once_keys_are_outside_of_it(library: Any) -> None:
    def windows(length: int) -> list[Any]:
        calls = workloads.of_model(small("mistral"), None, [1], [length], [length]).calls
        specs = [json.loads(call) for call in calls]
        return [call.get("params", {}).get("window_left") for call in specs if call["op"] == "attention"]

    assert windows(16) == [None, None] and windows(17) == [15, 15]


def test_what_is_left_out_is_said(library: Any) -> None:
    workload = lz.workload(model=small("gemma3"), seq=[8], context=[8], device="cpu")
    assert any("vision_config" in text for text in workload.left_out)
    assert len(workload.counts) == len(workload) and max(workload.counts) > 1
    sink = lz.workload(small("gpt_oss"), seq=[8], context=[8], device="cpu")
    assert any("sink" in text for text in sink.left_out)
    assert sink.coverage is not None and sink.coverage["flops"] < 1
    quantized = workloads.of_model(small("llama", quantization_config={"quant_method": "fp8"}), None, [1], [4], [4])
    assert any("quantization_config" in text for text in quantized.left_out)


def test_a_phase_that_cannot_be_traced_is_left_out_and_told(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transformers_models.run_of

    def broken(built: Any, phase: str, context: int) -> Any:
        run = real(built, phase, context)  # type: ignore[arg-type]

        def stops(model: Any, recorder: Any, args: Any, given: Any) -> None:
            run(model, recorder, args, given)
            if phase == "decode":
                torch.zeros(3).sum().item()

        return stops

    monkeypatch.setattr(transformers_models, "run_of", broken)
    traced = workloads.of_model(small("llama"), None, [1], [8], [8])
    (told,) = [text for text in traced.left_out if text.startswith("decode of batch 1, length 8")]
    assert "test_workloads.py" in told and ".item()" in told
    with pytest.raises(UntraceableModelError, match=r"\.item\(\)") as error:
        workloads.of_model(small("llama"), None, [1], [8], [8], ["decode"])
    assert "depends on the values" in (error.value.hint or "")


def test_no_weight_is_allocated(library: Any) -> None:
    built = transformers_models.build("llama-3-70b", torch.bfloat16)
    assert {tensor.device.type for tensor in built.model.parameters()} == {"meta"}
    # Nothing but these models is affected.
    assert library.LlamaConfig()._attn_implementation != transformers_models.NAME


def test_a_configuration_may_come_in_many_forms(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    made = library.LlamaConfig.from_dict(config)
    hub = tmp_path / "hub" / "models--me--mine"
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc", encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = library.LlamaForCausalLM(made)
    wanted = lz.workload(model=config, seq=[8], context=[8], device="cpu")
    for given in (file, tmp_path, str(file), json.dumps(config), made, model, "me/mine"):
        assert lz.workload(model=given, seq=[8], context=[8], device="cpu") == wanted
    assert lz.workload(made, seq=8, context=8, device="cpu") == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "gpt5"}, "unknown model 'gpt5'"),
        ({"model": "no/such.json"}, "cannot be read"),
        ({"model": "{"}, "no JSON"),
        ({"model": {"hidden_size": 4}}, "'model_type' is None"),
        ({"model": {"model_type": "lama"}}, "no model_type 'lama'"),
        ({"model": "gpt2", "dtype": "int8"}, "cannot be in int8"),
        ({"model": "gpt2", "seq": [1025]}, "'gpt2' has 1024 positions, 1025 were asked for"),
        ({"model": "gpt2", "batch": [0]}, "'batch' is 0"),
        ({"model": {"model_type": "llama", "num_attention_heads": "many"}}, "many"),
        ({"model": 3}, "the model is a int"),
    ],
)
def test_what_is_no_model_is_refused(given: dict[str, Any], said: str, library: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        lz.workload(**given)
    assert said in str(error.value) and error.value.hint


def test_a_model_that_reads_everything_at_once_has_no_decode(library: Any) -> None:
    with pytest.raises(ConfigurationError, match="no decode phase"):
        workloads.of_model("bert-base", phases=["decode"])


def test_a_table_is_solved_for_a_configuration(library: Any) -> None:
    table = lz.solve(small("llama"), shape_buckets={"seq_len": [8, 16], "batch": [1, 2]}, device="cpu")
    assert table.model_id == "llama" and table.shape_buckets["seq_len"] == [8, 16]
    ops = {op["op"] for plan in table.plans for op in plan["ops"]}
    assert {"norm.rms", "mlp.linear", "posenc.rope", "attention.gqa.prefill", "attention.gqa.decode"} <= ops
    with pytest.raises(ConfigurationError, match="example inputs"):
        lz.solve(small("llama"), torch.zeros(1, 2), shape_buckets={"batch": [1]})


def test_without_transformers_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError) as error:
        lz.workload(model="gpt2")
    assert error.value.code == "NO_TRANSFORMERS" and "lz.tune(module, inputs)" in (error.value.hint or "")


class Block(nn.Module):
    """A layer of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))


@torch.no_grad()
def test_a_module_is_tuned_with_its_inputs() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    report = lz.tune(model, torch.randn(4, 32), budget="5s", samples=3)
    assert {entry.op for entry in report.tuned} == {"norm.layer", "mlp.linear"}
    forward = report.forward
    assert forward is not None and forward.module_us is not None
    assert (forward.calls + forward.unknown, forward.unknown) == (9, 0)
    lines = str(report).splitlines()
    assert lines[-1] == str(forward) and "cannot be improved" in lines[-1]
    assert report.to_dict()["forward"]["before_us"] == forward.before_us


@torch.no_grad()
def test_the_sums_are_count_times_latency() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 32)
    forward = lz.tune(model, x, budget="5s", samples=3).forward
    assert forward is not None
    before = after = improved = 0.0
    for call in lz.calls_of(model, x):
        data = lz.explain_call(call.spec, "cpu").to_dict()
        times = {candidate["kernel_id"]: candidate["time_us"] for candidate in data["candidates"]}
        torchs, chosen = times[data["baseline"]], times[data["chosen"]]
        before, after = before + call.count * torchs, after + call.count * chosen
        improved += call.count * torchs if chosen < torchs else 0.0
    assert forward.before_us == pytest.approx(before) and forward.after_us == pytest.approx(after)
    assert forward.improved_us == pytest.approx(improved)


def test_the_share_that_cannot_be_improved() -> None:
    from layerzero.tuning.forward import Forward

    known = Forward(before_us=80, after_us=60, calls=4, unknown=0, improved_us=50, module_us=100, coverage=None)
    assert known.fixed == 0.5
    assert str(known) == (
        "forward: 80.0 µs by torch's kernels, 60.0 µs by the chosen ones (count × median of 4 calls); "
        "50% of the module's 100.0 µs cannot be improved"
    )
    traced = Forward(before_us=80, after_us=60, calls=4, unknown=2, improved_us=20, module_us=None, coverage=None)
    assert traced.fixed == 0.75
    assert str(traced).endswith("of 4 calls, 2 of unknown latency); 75% of that cannot be improved")


@torch.no_grad()
def test_keyword_arguments_are_the_modules() -> None:
    assert len(lz.workload(Block(), torch.randn(4, 32), scale=2.0)) == 3
    bare = SimpleNamespace()
    with pytest.raises(ConfigurationError, match="SimpleNamespace"):
        lz.tune(bare)
    with pytest.raises(ConfigurationError, match="no call"):
        lz.tune(nn.ReLU(), torch.randn(4))
    with pytest.raises(ConfigurationError, match="no module that takes them"):
        lz.tune("rms_norm", torch.randn(4))
    with pytest.raises(ConfigurationError, match="two models"):
        lz.tune(Block(), torch.randn(4, 32), model="gpt2")


@torch.no_grad()
def test_a_module_without_memory_is_not_run() -> None:
    with torch.device("meta"):
        model = Block()
    report = lz.tune(model, lz.TensorSpec((4, 32), "float32"), budget="2s", samples=3)
    assert report.forward is not None and report.forward.module_us is None


def test_a_module_is_timed_without_drawing_random_numbers() -> None:
    from layerzero.tuning.forward import ROUNDS, module_us

    ran = []

    def noisy() -> None:
        ran.append(torch.rand(3))

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert module_us(noisy) is not None
    assert 2 <= len(ran) <= ROUNDS + 1
    assert torch.equal(torch.rand(3), expected)


def test_a_module_that_fails_has_no_latency() -> None:
    from layerzero.tuning.forward import module_us

    assert module_us(lambda: 1 / 0) is None
