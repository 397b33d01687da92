"""`attn_implementation="layerzero"`: the logits and texts of transformers' own `eager` attention."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import layerzero as lz
import layerzero.integrations.transformers
import pytest
import torch
import transformers
from layerzero.integrations._transformers import attention as transformers_attention
from layerzero.integrations._transformers import masks as transformers_masks
from transformers_models_built import DECODERS, OTHERS, decoder, randomized, tokens

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
CLOSE = 2e-5


@pytest.fixture(autouse=True)
def said_again() -> None:
    """Each test gets its warnings: they are given once for each reason."""
    transformers_attention._said.clear()


@pytest.fixture(params=sorted(DECODERS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model with `eager`, and the same one with `layerzero`."""
    return decoder(request.param, "eager"), decoder(request.param, "layerzero")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `lz.attention` is called with by the attention function."""
    seen: list[dict[str, Any]] = []
    real = transformers_attention.attention

    def attention(query: Any, key: Any, value: Any, causal: bool, scale: Any, **rest: Any) -> Any:
        seen.append({"keys": key.shape[2], "queries": query.shape[2], "causal": causal, **rest})
        return real(query, key, value, causal, scale, **rest)

    monkeypatch.setattr(transformers_attention, "attention", attention)
    return seen


def apart(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor | None = None) -> float:
    difference = (a - b).detach().abs()
    if where is not None:
        difference = difference * where[..., None]
    return float(difference.max())


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@torch.no_grad()
def test_logits_are_those_of_eager(pair: tuple[Any, Any]) -> None:
    eager, ours = pair
    ids = tokens(2, 20)
    assert apart(eager(ids).logits, ours(ids).logits) < CLOSE
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[1, :6] = 0
    right[1, -6:] = 0
    for padding in (left, right):
        a, b = (model(ids, attention_mask=padding).logits for model in pair)
        assert apart(a, b, padding) < CLOSE


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(pair: tuple[Any, Any]) -> None:
    eager, ours = pair
    ids = tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    assert apart(eager(ids, position_ids=positions, use_cache=False).logits, packed) < CLOSE
    if eager.config.model_type == "gpt_oss":
        # transformers itself does not separate them in this model.
        return
    alone = ours(ids[:, 8:], use_cache=False).logits
    assert apart(packed[:, 8:], alone) < CLOSE


@torch.no_grad()
@pytest.mark.parametrize("compiles", [False, True])
def test_sequences_packed_by_their_starts_do_not_see_each_other(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a program that compiles, masks are in memory.
    monkeypatch.setattr(transformers_masks, "_compiles", lambda: compiles)
    model, ids = decoder("mistral", "layerzero"), tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    # A mask of ones: then transformers does not look at the positions.
    given = {"position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False}
    packed = model(ids, **given, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=12, max_length_k=12).logits
    assert apart(packed[:, :8], model(ids[:, :8], use_cache=False).logits) < CLOSE
    assert apart(packed[:, 8:], model(ids[:, 8:], use_cache=False).logits) < CLOSE


def test_a_paged_cache_is_refused() -> None:
    query, key, value = _states()
    with pytest.raises(lz.InvalidCallError, match=r"paged cache"):
        transformers_attention.attend(_Module(), query, key, value, None, cache=object())


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@torch.no_grad()
@pytest.mark.parametrize("keeps", ["window", "everything"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(pair: tuple[Any, Any], keeps: str) -> None:
    if keeps == "everything" and pair[0].config.model_type == "deepseek_v32":
        pytest.skip("its cache must hold the indexer's keys too")
    ids = tokens(2, 20)
    whole = pair[1](ids).logits
    for model in pair:
        # Without a configuration it keeps keys beyond a layer's window.
        cache = transformers.DynamicCache(**({"config": model.config} if keeps == "window" else {}))
        chunks = [
            model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits
            for begin, end in ((0, 9), (9, 15), (15, 16), (16, 20))
        ]
        assert apart(torch.cat(chunks, 1), whole) < CLOSE


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generated_tokens_are_those_of_eager(pair: tuple[Any, Any], cache: str) -> None:
    ids = tokens(2, 12)
    padding = torch.ones_like(ids)
    for _ in range(2):
        how = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        a, b = (model.generate(ids, attention_mask=padding, **GREEDY, **how) for model in pair)
        assert torch.equal(a, b)
        padding[1, :5] = 0


@torch.no_grad()
def test_a_quantized_cache_is_served() -> None:
    """A cache that gives back other keys than it was given; optimum-quanto is not here, so the layer is our own."""
    from transformers.cache_utils import DynamicLayer

    class Rounded(DynamicLayer):
        def update(self, key_states: Any, value_states: Any, *rest: Any, **named: Any) -> Any:
            keys, values = super().update(key_states, value_states, *rest, **named)
            return (keys * 16).round() / 16, (values * 16).round() / 16

    ids = tokens(2, 14)
    results = []
    for name in ("eager", "layerzero"):
        model = decoder("llama", name)
        cache = transformers.DynamicCache(config=model.config)
        cache.layers = [Rounded() for _ in range(model.config.num_hidden_layers)]
        first = model(ids[:, :9], past_key_values=cache, use_cache=True).logits
        rest = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(9, 14)]
        results.append(torch.cat([first, *rest], 1))
    assert apart(*results) < CLOSE


@torch.no_grad()
def test_no_mask_is_made_where_numbers_say_it(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, device: Any) -> Any:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(transformers_masks.Described, "tensor", never)
    monkeypatch.setattr(transformers_masks, "_compiles", lambda: False)
    model, ids = decoder("gemma3", "layerzero"), tokens(2, 20)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, attention_mask=torch.ones_like(ids))
    assert [call.get("window") for call in calls] == [6, None]
    assert all(call["causal"] and call.get("attn_mask") is None for call in calls)
    calls.clear()
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    # One query: of a window of 7 the last 7 keys, and all 21.
    assert [(call["queries"], call["keys"], call["causal"]) for call in calls] == [(1, 7, False), (1, 21, False)]


@torch.no_grad()
def test_a_mask_without_memory_is_a_mask_to_everyone_else() -> None:
    described = transformers_masks.Described(3, 5, 2, 1, 0)
    mask = transformers_masks.DescribedMask.of(described, 2, "cpu")
    expected = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    assert mask.shape == (2, 1, 3, 5)
    assert mask.dtype == torch.bool
    assert torch.equal(mask[1, 0], expected)
    assert torch.equal((~mask)[0, 0], ~expected)
    assert torch.equal(torch.cat([mask, mask], dim=-1)[0, 0], torch.cat([expected, expected], dim=-1))
    assert mask[:, :, -1:].sum() == 4
    assert torch.equal(mask.to(torch.int64)[0, 0], expected.long())


@torch.no_grad()
def test_masks_of_the_user_are_respected() -> None:
    eager, ours = decoder("llama", "eager"), decoder("llama", "layerzero")
    ids = tokens(2, 10)
    allowed = torch.ones(10, 10).tril().bool()
    allowed[:, 3] = False
    allowed[3, 3] = True
    added = torch.zeros(2, 1, 10, 10).masked_fill(~allowed, torch.finfo(torch.float32).min)
    right = eager(ids, attention_mask=added).logits
    assert apart(right, ours(ids, attention_mask=added).logits) < CLOSE
    assert apart(right, ours(ids, attention_mask=allowed.expand(2, 1, 10, 10)).logits) < CLOSE


@torch.no_grad()
def test_sinks_join_the_softmax(calls: list[dict[str, Any]]) -> None:
    eager, ours, ids = decoder("gpt_oss", "eager"), decoder("gpt_oss", "layerzero"), tokens(1, 8)
    right = eager(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroWarning)
        assert apart(right, ours(ids).logits) < CLOSE
    assert calls and all(call["sinks"] is not None for call in calls)
    # They make a difference.
    for layer in ours.model.layers:
        layer.self_attn.sinks.zero_()
    assert apart(right, ours(ids).logits) > 100 * CLOSE


def test_sinks_with_dropout_or_of_another_shape_run_in_the_models_own_attention() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    attention = GptOssAttention(DECODERS["gpt_oss"](), 0).eval()
    with torch.no_grad():
        attention.sinks.normal_()
    query, key, value = _states()
    with pytest.warns(lz.LayerZeroWarning, match=r"attention sinks with dropout"):
        transformers_attention.attend(attention, query, key, value, None, 0.5, 0.3, s_aux=attention.sinks)
    with pytest.warns(lz.LayerZeroWarning, match=r"attention sinks of shape \[4, 1\]"):
        transformers_attention.attend(attention, query, key, value, None, 0.0, 0.3, s_aux=attention.sinks[:4, None])


class _Module(torch.nn.Module):
    """An attention module of a file that has no function of its own to fall back on."""

    is_causal = True


def _states(batch: int = 2, queries: int = 4, keys: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_a_mask_of_an_unknown_form_is_never_used() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    query, key, value = _states()
    two = torch.ones(2, 4)
    with pytest.raises(lz.InvalidCallError, match=r"a mask of the form \[2, 4\] of float32"):
        transformers_attention.attend(_Module(), query, key, value, two)
    attention = LlamaAttention(DECODERS["llama"](), 0).eval()
    counts = torch.zeros(2, 1, 4, 4, dtype=torch.int64)
    with pytest.warns(lz.LayerZeroWarning, match=r"a mask of the form \[2, 1, 4, 4\] of int64"):
        out, weights = transformers_attention.attend(attention, query, key, value, counts, scaling=0.3)
    # The model's own function adds it.
    assert weights is not None
    expected, _ = transformers_attention._eager_of(LlamaAttention)(attention, query, key, value, counts, scaling=0.3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rest", [{}, {"output_attentions": True}, {"s_aux": torch.zeros(4)}])
def test_an_argument_that_nobody_knows_is_refused(rest: dict[str, Any]) -> None:
    """Its own attention would compute the result of a call without that argument."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLAttention

    module = MiniMaxM3VLAttention.__new__(MiniMaxM3VLAttention)
    torch.nn.Module.__init__(module)
    query, key, value = _states()
    blocks = torch.zeros(2, 2, 4, 1, dtype=torch.int64)
    with pytest.raises(lz.InvalidCallError, match=r"does not serve the argument block_indices"):
        transformers_attention.attend(module, query, key, value, None, scaling=0.3, block_indices=blocks, **rest)


def test_sparse_indices_are_the_only_keys() -> None:
    query, key, value = _states(queries=4, keys=4)
    indices = torch.tensor([[[0, 0], [0, 1], [1, 2], [0, 3]]]).expand(2, -1, -1)
    causal = torch.ones(4, 4).tril().bool()[None, None].expand(2, 1, -1, -1)
    out, _ = transformers_attention.attend(_Module(), query, key, value, causal, scaling=0.3, indices=indices)
    allowed = torch.zeros(2, 4, 4, dtype=torch.bool).scatter(-1, indices, True)[:, None] & causal
    wide = [t.double() for t in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))]
    scores = (wide[0] @ wide[1].transpose(-1, -2) * 0.3).masked_fill(~allowed, -torch.inf)
    assert apart((scores.softmax(-1) @ wide[2]).transpose(1, 2), out.double()) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_gradients_are_those_of_eager(name: str) -> None:
    ids = tokens(2, 12)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    # What is padding predicts nothing, also not the first token after it: its own attention is no matter.
    labels = ids.clone()
    labels[1, :5] = -100
    gradients = []
    for implementation in ("eager", "layerzero"):
        model = decoder(name, implementation).train()
        model(ids, attention_mask=padding, labels=labels).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert max(apart(a, b) for a, b in zip(*gradients, strict=True)) < 1e-5


def test_dropout_draws_as_sdpa_does() -> None:
    config = DECODERS["llama"]()
    config.attention_dropout = 0.3
    ids = tokens(2, 12)
    results = []
    for implementation in ("sdpa", "layerzero"):
        torch.manual_seed(0)
        model = randomized(transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation))
        model.train()
        torch.manual_seed(5)
        results.append(model(ids).logits)
    still = model.eval()(ids).logits
    assert apart(results[1], still) > 1e-3
    assert results[0].shape == results[1].shape


# Encoders, encoder-decoders, pictures and speech.


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_models_give_what_eager_gives(name: str, calls: list[dict[str, Any]]) -> None:
    (config, kind), given = OTHERS[name]()
    results = []
    for implementation in ("eager", "layerzero"):
        torch.manual_seed(0)
        model = randomized(kind._from_config(config, attn_implementation=implementation))
        results.append(model(**given).logits)
    where = given.get("attention_mask") if name == "bert" else None
    assert apart(*results, where) < CLOSE
    # The file of an old version computes attention itself; then nothing is called, and the result is right.
    by_name = transformers_masks.written(kind.__module__).by_name
    assert bool(calls) == by_name


@pytest.mark.parametrize("name", ["t5", "whisper"])
@torch.no_grad()
def test_encoder_decoders_generate_what_eager_generates(name: str) -> None:
    (config, kind), given = OTHERS[name]()
    given.pop("decoder_input_ids")
    texts = []
    for implementation in ("eager", "layerzero"):
        torch.manual_seed(0)
        model = randomized(kind._from_config(config, attn_implementation=implementation))
        texts.append(model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None))
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_model_that_computes_attention_itself_gets_the_mask_it_adds() -> None:
    config = transformers.GPTNeoXJapaneseConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_multiple_size=2
    )
    kind = transformers.GPTNeoXJapaneseForCausalLM
    assert not transformers_masks.written(kind.__module__).by_name
    ids = tokens(2, 12)
    results = []
    for implementation in ("eager", "layerzero"):
        torch.manual_seed(0)
        model = randomized(kind._from_config(config, attn_implementation=implementation))
        results.append(model(ids).logits)
    assert apart(*results) == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_compiled_as_one_graph(name: str) -> None:
    eager, ours, ids = decoder(name, "eager"), decoder(name, "layerzero"), tokens(2, 16)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    assert apart(eager(ids).logits, compiled(ids).logits) < CLOSE
    a, b = (model(ids, attention_mask=padding).logits for model in (eager, compiled))
    assert apart(a, b, padding) < CLOSE
    # By layer: the mask is made outside of the graphs.
    torch.compiler.reset()
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    for length in (16, 9, 11):
        assert apart(eager(ids[:, :length]).logits, ours(ids[:, :length]).logits) < CLOSE
    torch.compiler.reset()


# How it is registered.


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    import os

    package = str(Path(lz.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": package, "TRANSFORMERS_VERBOSITY": "error", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


BUILD = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(config, attn_implementation="layerzero")
import torch
print(tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""


def test_the_environment_registers_it() -> None:
    refused = run("import layerzero" + BUILD)
    assert refused.returncode != 0
    assert "layerzero" in refused.stderr
    done = run("import layerzero" + BUILD, LAYERZERO_TRANSFORMERS="1")
    assert done.stdout.strip() == "(1, 3, 9)", done.stderr
    assert run("import layerzero as lz\nlz.register_with_transformers()" + BUILD).stdout.strip() == "(1, 3, 9)"


def test_importing_layerzero_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, layerzero as lz; lz.optimize; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    assert run(code).stdout.strip() == "[]"
    assert run(code, LAYERZERO_TRANSFORMERS="1").stdout.strip() == "[]"


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.50.3")
    with pytest.raises(lz.ConfigurationError, match=r"transformers 4\.50\.3 has no mask functions"):
        lz.register_with_transformers()


# Models whose file has both kinds of attention.


def _git() -> tuple[Any, dict[str, Any]]:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GitConfig(
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return (config, transformers.GitForCausalLM), {"input_ids": tokens(2, 10), "pixel_values": pixels}


def _bigbird_pegasus() -> tuple[Any, dict[str, Any]]:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 99, "d_model": 32}
    config = transformers.BigBirdPegasusConfig(**sizes, attention_type="original_full", max_position_embeddings=64)
    padding = torch.ones(2, 10, dtype=torch.int64)
    padding[0, :3] = 0
    given = {"input_ids": tokens(2, 10), "attention_mask": padding, "decoder_input_ids": tokens(2, 6, seed=4)}
    return (config, transformers.BigBirdPegasusForConditionalGeneration), given


@pytest.mark.parametrize("build", [_git, _bigbird_pegasus])
@torch.no_grad()
def test_a_file_with_both_kinds_of_attention_gives_what_eager_gives(build: Any) -> None:
    (config, kind), given = build()
    torch.manual_seed(0)
    model = randomized(kind._from_config(config, attn_implementation="eager"))
    right = model(**given).logits
    with lz.patched(model, only=("attention",)) as optimized:
        assert apart(right, model(**given).logits) == 0
        assert model.config._attn_implementation == "eager"
    assert [one.operation for one in optimized.report.replaced] == []
    assert any("computes attention itself" in one.why for one in optimized.report.kept)
    model.set_attn_implementation("layerzero")
    assert apart(right, model(**given).logits) < CLOSE


def test_a_class_of_another_configuration_does_not_count() -> None:
    """Gemma 4's audio attention computes its scores itself; its text model looks the function up."""
    pytest.importorskip("transformers.models.gemma4")
    from transformers.models.gemma4 import configuration_gemma4 as configs
    from transformers.models.gemma4 import modeling_gemma4

    file = transformers_masks.written(modeling_gemma4.__name__)
    assert file.serves(configs.Gemma4TextConfig)
    assert not file.serves(configs.Gemma4AudioConfig)
    assert not file.serves(configs.Gemma4Config)


@torch.no_grad()
def test_writing_into_a_described_mask_is_seen() -> None:
    query, key, value = _states(batch=1)
    mask = transformers_masks.DescribedMask.of(transformers_masks.Described(4, 4, 0, None, 0), 1, "cpu")
    mask[..., 2:, 0] = False
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)[None, None]
    out, _ = transformers_attention.attend(_Module(), query, key, value, mask)
    assert apart(_by_hand(query, key, value, expected), out.double()) < 1e-5


@pytest.mark.parametrize(("offset", "earlier"), [(2, None), (2, 1), (1, 3), (0, 1)])
@torch.no_grad()
def test_a_described_mask_that_ends_after_the_keys(offset: int, earlier: int | None) -> None:
    query, key, value = _states(batch=1)
    described = transformers_masks.Described(4, 4, offset, earlier, 0)
    allowed = described.tensor("cpu")
    mask = transformers_masks.DescribedMask.of(described, 1, "cpu")
    out, _ = transformers_attention.attend(_Module(), query, key, value, mask)
    # Of a query without a key nothing is said.
    some = allowed[0, 0].any(-1)
    assert apart(_by_hand(query, key, value, allowed)[:, some], out.double()[:, some]) < 1e-5


@torch.no_grad()
def test_a_described_mask_that_begins_before_the_keys() -> None:
    query, key, value = _states(batch=1)
    described = transformers_masks.Described(4, 4, -1, None, 0)
    mask = transformers_masks.DescribedMask.of(described, 1, "cpu")
    out, _ = transformers_attention.attend(_Module(), query, key, value, mask)
    expected = _by_hand(query, key, value, described.tensor("cpu"))
    # The first query has no key.
    assert apart(expected[:, 1:], out.double()[:, 1:]) < 1e-5


def _by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Attention in float64 with two query heads for each of the keys', sequence first."""
    q, k, v = (t.double() for t in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)))
    scores = (q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)
