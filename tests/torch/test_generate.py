"""`CompiledModel.generate`: tokens equal those of transformers' own generate, whatever the model, the batch and the padding."""

import gc
import threading
import weakref

import layerzero as lz
import pytest
import torch
from layerzero.errors import InvalidCallError

transformers = pytest.importorskip("transformers")

VOCABULARY = 211
#: A sliding window that is shorter than the prompts.
WINDOW = 5


def _config(kind, **own):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    common = {"vocab_size": VOCABULARY, "intermediate_size": 48, "max_position_embeddings": 96}
    return kind(**common, **shape, **own, bos_token_id=1, eos_token_id=2)


def _made(name):
    torch.manual_seed(0)
    t = transformers
    if name == "gpt2":
        config = t.GPT2Config(
            n_layer=2, n_head=4, n_embd=32, vocab_size=VOCABULARY, n_positions=96, bos_token_id=1, eos_token_id=2
        )
        model = t.GPT2LMHeadModel(config)
    else:
        kinds = {
            "llama": (t.LlamaForCausalLM, t.LlamaConfig, {}),
            "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config, {}),
            "mistral": (t.MistralForCausalLM, t.MistralConfig, {"sliding_window": WINDOW}),
            "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config, {"sliding_window": WINDOW, "head_dim": 8}),
        }
        kind, config, own = kinds[name]
        model = kind(_config(config, **own))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter in model.parameters():
            # Scores that differ enough for the largest to be clear.
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


_models = {}


def compiled(name):
    """A model and its compiled form, made once."""
    if name not in _models:
        model = _made(name)
        _models[name] = model, lz.compile(model)
    return _models[name]


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    _models.clear()


def _prompt(batch, tokens, seed=1):
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def _own(model, ids, count, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mistral", "gemma2"])
def test_greedy_tokens_are_those_of_transformers(name):
    model, ours = compiled(name)
    for batch, tokens, count in [(1, 1, 5), (1, 9, 20), (3, 7, 8)]:
        ids = _prompt(batch, tokens)
        assert torch.equal(ours.generate(ids, count), _own(model, ids, count)), (batch, tokens)
    # Padding on the left, as many tokens as the window and more.
    ids, mask = _prompt(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :2], mask[2, :7] = 0, 0
    assert torch.equal(ours.generate(ids, 12, attention_mask=mask), _own(model, ids, 12, mask))


def test_only_native_kernels_run_and_no_mask_is_made():
    _, ours = compiled("llama")
    for tokens in (1, 12):
        steps = ours.decoder().explain(tokens=tokens, written=20)
        assert not [step for step in steps if step.kernel.startswith(("reference", "host"))]
        assert sum(step.op == "cached_attention" for step in steps) == 2
        assert not [step for step in steps if step.op in ("attention", "where", "triangle", "softmax")]
        assert sum(step.op == "index_copy" for step in steps) == 4
        # The caches are written where they lie.
        assert not [step for step in steps if step.op == "copy"]


def test_one_graph_serves_every_size():
    _, ours = compiled("gpt2")
    ours.generate(_prompt(2, 3), 3)
    decoder = ours.decoder()
    packed = decoder.report().packed_bytes
    ours.generate(_prompt(1, 6), 4)
    assert ours.decoder() is decoder
    assert decoder.report().packed_bytes == packed
    assert decoder.report().exports == 1


def test_attention_is_of_what_is_written():
    """The room that is not used is never read: it may hold anything."""
    model, ours = compiled("llama")
    decoder = ours.decoder()
    for one in decoder.cache(1, 20):
        one.fill_(float("nan"))
    ids = _prompt(1, 5)
    assert torch.equal(ours.generate(ids, 6), _own(model, ids, 6))


def test_lists_of_prompts_are_padded():
    model, ours = compiled("gpt2")
    prompts = [_prompt(1, n, seed=n)[0] for n in (3, 8, 5)]
    found = ours.generate([prompts[0].tolist(), *prompts[1:]], 6)
    assert found.shape == (3, 14)
    for row, prompt in zip(found, prompts, strict=True):
        assert torch.equal(row[8 - len(prompt) :], _own(model, prompt[None], 6)[0])


def test_sequences_end():
    model, ours = compiled("gpt2")
    ids = _prompt(2, 5)
    plain = ours.generate(ids, 8)
    # The second new token of the first sequence ends it, and the second goes on.
    end = int(plain[0, 6])
    found = ours.generate(ids, 8, eos_token_id=end, pad_token_id=7)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=7
    )
    assert torch.equal(found, expected)
    assert found[0, 7:].eq(7).all()
    # When all have ended, nothing more is generated.
    assert ours.generate(ids[:1], 8, eos_token_id=[end, 1]).shape == (1, 7)


def test_tokens_are_told_one_by_one():
    _, ours = compiled("gpt2")
    ids, told = _prompt(2, 4), []
    found = ours.generate(ids, 5, on_token=told.append)
    assert torch.equal(torch.stack(told, 1), found[:, 4:])
    assert ours.generate(ids, 5, on_token=lambda tokens: False).shape == (2, 5)


def test_draws_follow_the_seed():
    _, ours = compiled("llama")
    ids = _prompt(2, 4)

    def drawn(**how):
        return ours.generate(ids, 12, **how)

    first = drawn(temperature=2.0, seed=3)
    assert torch.equal(first, drawn(temperature=2.0, seed=3))
    assert not torch.equal(first, drawn(temperature=2.0, seed=4))
    assert torch.equal(first, drawn(temperature=2.0, generator=torch.Generator().manual_seed(3)))
    greedy = drawn()
    assert torch.equal(drawn(temperature=0.0), greedy)
    assert torch.equal(drawn(top_k=1, seed=5), greedy)
    assert torch.equal(drawn(top_p=1e-6, seed=5), greedy)
    assert torch.equal(drawn(top_k=9, top_p=1e-6, seed=5), greedy)
    # Sequences of one prompt differ.
    several = ours.generate(ids[:1], 12, temperature=2.0, seed=1, num_return_sequences=3)
    assert several.shape == (3, 16)
    assert len({tuple(row.tolist()) for row in several}) == 3


def test_draws_are_among_the_most_likely():
    model, ours = compiled("llama")
    ids = _prompt(1, 4)
    with torch.no_grad():
        likely = model(ids).logits[0, -1].topk(3).indices.tolist()
    found = ours.generate(ids, 1, top_k=3, temperature=5.0, seed=0, num_return_sequences=64)[:, -1]
    assert set(found.tolist()) == set(likely)
    found = ours.generate(ids, 1, top_k=3, top_p=1.0, temperature=5.0, seed=0, num_return_sequences=64)[:, -1]
    assert set(found.tolist()) == set(likely)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"max_new_tokens": 100}, "TOO_LONG"),
        ({"max_new_tokens": -1}, "BAD_PARAM"),
        ({"top_k": 0}, "BAD_PARAM"),
        ({"top_p": 1.5}, "BAD_PARAM"),
        ({"temperature": -1.0}, "BAD_PARAM"),
        ({"temperature": 1.0, "seed": 1, "generator": torch.Generator()}, "BAD_PARAM"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "BAD_DATA"),
        ({"attention_mask": torch.ones(1, 2)}, "WRONG_SHAPE"),
    ],
)
def test_what_cannot_be_is_refused(how, code):
    _, ours = compiled("gpt2")
    with pytest.raises(InvalidCallError) as raised:
        ours.generate(_prompt(1, 3), **{"max_new_tokens": 2, **how})
    assert raised.value.code == code


def test_models_without_a_cache_are_refused():
    with pytest.raises(InvalidCallError, match="no causal language model"):
        lz.compile(torch.nn.Linear(4, 4)).generate(_prompt(1, 3), 2)
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    bloom = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(InvalidCallError, match="cannot generate as a compiled model"):
        lz.compile(bloom).generate(_prompt(1, 3), 2)
    model, _ = compiled("gpt2")
    with pytest.raises(InvalidCallError, match="training mode"):
        lz.compile(model.train()).generate(_prompt(1, 3), 2)
    model.eval()


def test_a_pass_without_a_cache_is_a_call():
    model, _ = compiled("gpt2")
    ours, ids = lz.compile(model), _prompt(1, 5)
    with torch.no_grad():
        with pytest.raises(lz.LayerZeroError, match=r"use_cache=False, or generate"):
            ours(ids)
        torch.testing.assert_close(ours(ids, use_cache=False).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_model_is_left_as_it_was():
    model = _made("gpt2")
    before, gone = model.config._attn_implementation, weakref.ref(model)
    ours = lz.compile(model)
    ours.generate(_prompt(1, 3), 1)
    assert model.config._attn_implementation == before
    del ours, model
    gc.collect()
    assert gone() is None


def test_narrow_weights_generate_too():
    model, _ = compiled("llama")
    narrow = lz.compile(model, weights="int8")
    found = narrow.generate(_prompt(2, 6), 5)
    assert found.shape == (2, 11)
    report = narrow.decoder().report()
    assert report.weights == "int8"
    assert report.packed_bytes < report.weight_bytes
    assert 0 < report.largest_error < 0.03
    steps = [step for step in narrow.decoder().explain() if step.op in ("linear", "matmul")]
    assert steps
    assert all("linear_int8" in step.kernel for step in steps), steps


def test_the_benchmark_times_the_same_step():
    from layerzero.bench.decode_steps import DecodeStep, layerzero_step

    model, _ = compiled("llama")
    step, token = DecodeStep(model, 9, layers=2, kv_heads=2, width=8), torch.tensor([[5]])
    with torch.no_grad():
        torch.testing.assert_close(layerzero_step(step, token)(), step(token), atol=1e-4, rtol=1e-4)


def test_generating_inside_of_on_token_and_in_threads():
    model, ours = compiled("gpt2")
    ids, told = _prompt(1, 4), []

    def again(_):
        told.append(ours.generate(_prompt(2, 7), 3))
        ours.decoder().report()

    worker = threading.Thread(target=lambda: told.append(ours.generate(ids, 6, on_token=again)), daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), "deadlock"
    assert torch.equal(told.pop(), _own(model, ids, 6))
    assert all(torch.equal(one, _own(model, _prompt(2, 7), 3)) for one in told)
    expected, found = [_own(model, _prompt(1, n), 8) for n in range(2, 6)], {}

    def work(n):
        found[n] = [ours.generate(_prompt(1, n), 8) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert all(torch.equal(one, expected[n - 2]) for n, several in found.items() for one in several)
    assert len(found) == 4


def test_answers_leave_the_cache_of_a_text_alone():
    model, ours = compiled("llama")
    ids = _prompt(1, 5)

    def ask(_):
        decoder = ours.decoder()
        decoder.explain(batch=1, tokens=3, written=9)
        decoder.profile(batch=1, rounds=2)

    assert torch.equal(ours.generate(ids, 6, on_token=ask), _own(model, ids, 6))


def test_ids_are_one_prompt():
    model, ours = compiled("gpt2")
    ids = _prompt(1, 5)
    assert torch.equal(ours.generate(ids[0].tolist(), 4), _own(model, ids, 4))


@pytest.mark.parametrize(
    ("ids", "how", "code"),
    [
        ([1.5, 2.0], {}, "BAD_DATA"),
        ([[1.5, 2.0]], {}, "BAD_DATA"),
        ([True, False], {}, "BAD_DATA"),
        ("text", {}, "BAD_DATA"),
        ([["text"]], {}, "BAD_DATA"),
        ({"input_ids": [[1, 2]]}, {}, "BAD_DATA"),
        (7, {}, "BAD_DATA"),
        ([[]], {}, "WRONG_SHAPE"),
        ([], {}, "WRONG_SHAPE"),
        ([[3, 4]], {"num_return_sequences": 0}, "BAD_PARAM"),
        ([[3, 4]], {"num_return_sequences": True}, "BAD_PARAM"),
        ([[3, 4]], {"num_return_sequences": 1.5}, "BAD_PARAM"),
        (torch.tensor([[3, 0, 4]]), {}, "BAD_DATA"),
    ],
)
def test_what_are_no_ids_is_refused(ids, how, code):
    _, ours = compiled("gpt2")
    with pytest.raises(InvalidCallError) as raised:
        ours.generate(ids, 2, **how)
    assert raised.value.code == code
    assert raised.value.hint


def test_padding_is_as_in_transformers():
    model, ours = compiled("llama")
    ids = _prompt(3, 9)
    ids[0, :2], ids[2, :7] = 0, 0
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours.generate(ids, 6), expected)
    model.generation_config.pad_token_id = 5
    try:
        found = ours.generate([[9, 8, 7], [6]], 2)
        assert found[1, :2].tolist() == [5, 5]
        plain = ours.generate(_prompt(2, 5), 8)
        found = ours.generate(_prompt(2, 5), 8, eos_token_id=int(plain[0, 6]))
        assert found[0, 7:].eq(5).all()
        # What also ends a text is no padding.
        with pytest.warns(lz.errors.LayerZeroWarning, match="pads and ends texts"):
            ours.generate(torch.tensor([[5, 8], [7, 8]]), 2, eos_token_id=5)
    finally:
        model.generation_config.pad_token_id = 0


def test_generating_follows_the_precision():
    model, _ = compiled("llama")
    ours = lz.compile(model, precision="high")
    ours.generate(_prompt(1, 3), 2)
    assert ours.decoder().report().precision == "high"


def test_generating_follows_changed_weights():
    model = _made("gpt2")
    ours, ids = lz.compile(model), _prompt(1, 5)
    ours.generate(ids, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1))
    assert torch.equal(ours.generate(ids, 4), _own(model, ids, 4))


def test_generating_under_autocast_is_in_the_models_numbers():
    model = _made("llama")
    ours, ids = lz.compile(model, weights="bfloat16"), _prompt(1, 5)
    plain = lz.compile(model)
    with torch.autocast("cpu"):
        assert torch.equal(plain.generate(ids, 5), _own_outside(model, ids, 5))
        ours.generate(ids, 2)
        assert ours.decoder().report().largest_error < 0.05


def _own_outside(model, ids, count):
    with torch.autocast("cpu", enabled=False):
        return _own(model, ids, count)


def test_a_model_in_training_mode_does_not_generate():
    model = _made("gpt2")
    ours = lz.compile(model)
    ours.generate(_prompt(1, 3), 1)
    model.train()
    with pytest.raises(InvalidCallError, match="training mode"):
        ours.generate(_prompt(1, 3), 1)
    model.eval()
    ours.generate(_prompt(1, 3), 1)


def test_steps_are_counted():
    _, ours = compiled("llama")
    decoder = ours.decoder()
    before = decoder.report().calls
    ours.generate(_prompt(1, 3), 4)
    report = decoder.report()
    assert report.calls == before + 4
    assert report.model_calls == {}
