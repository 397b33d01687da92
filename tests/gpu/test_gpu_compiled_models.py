"""`lz.compile` on a CUDA device: results are the model's, in the first run, in a captured one and in replays."""

from __future__ import annotations

import copy
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero.errors import LayerZeroWarning
from torch import Tensor, nn

pytest.importorskip("transformers")
from transformers_models_built import DECODERS, Logits, decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

#: Decoders whose whole step is one graph.
GRAPHS = ("gpt2", "llama", "qwen2", "gemma2", "mistral")


def ids_of(batch: int, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (batch, tokens), generator=generator).cuda()


def is_captured(compiled: Any) -> bool:
    sessions = [variant.session for variant in compiled._variants]
    return any(sizes.captured is not None for one in sessions for sizes in one._known.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GRAPHS)
def test_logits(name: str, dtype: torch.dtype) -> None:
    model = Logits(decoder(name, "sdpa").to(dtype).cuda()).eval()
    exact = copy.deepcopy(model).double()
    compiled = lz.compile(model)
    with torch.no_grad():
        for tokens in (9, 17):
            for seed in range(4):
                ids = ids_of(2, tokens, seed)
                right = exact(ids)
                # No further from float64 than the model itself, within a factor.
                own = float((model(ids).double() - right).abs().max())
                found = float((compiled(ids).double() - right).abs().max())
                assert found <= 3 * own + 1e-5, (tokens, seed, found, own)
    assert is_captured(compiled)
    report = compiled.report()
    assert report.calls == 8
    assert not report.model_calls


@pytest.mark.parametrize("name", sorted(set(DECODERS) - set(GRAPHS)))
def test_logits_of_other_decoders(name: str) -> None:
    """By graphs, or by the model itself: right in any case."""
    model = Logits(decoder(name, "eager").cuda()).eval()
    compiled = lz.compile(model)
    with torch.no_grad():
        for seed in range(4):
            ids = ids_of(2, 9, seed)
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", GRAPHS)
def test_it_generates_what_the_model_does(name: str) -> None:
    model = decoder(name, "sdpa").cuda()
    ids = ids_of(3, 9, 1)
    padded = ids.clone()
    padded[0, :4] = 0
    compiled = lz.compile(model)
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompts in (ids, padded):
        mask = (prompts != 0).long()
        expected = model.generate(prompts, attention_mask=mask, max_new_tokens=12, **how)
        found = compiled.generate(prompts, 12, attention_mask=mask, eos_token_id=[])
        assert found.tolist() == expected.tolist()
        drawn = [compiled.generate(prompts, 5, temperature=0.8, top_p=0.9, seed=3, eos_token_id=[]) for _ in range(2)]
        assert torch.equal(*drawn)


def _encoders() -> list[Any]:
    import transformers

    t5 = transformers.T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    vit = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    whisper = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96, num_mel_bins=16,
        max_source_positions=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=96, vocab_size=99,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return [
        (
            transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
                )
            ),
            lambda seed: ids_of(2, 11, seed),
        ),
        (transformers.T5EncoderModel(t5), lambda seed: ids_of(2, 11, seed)),
        (transformers.ViTModel(vit), lambda seed: _numbers(seed, 2, 3, 32, 32)),
        (transformers.WhisperModel(whisper).encoder, lambda seed: _numbers(seed, 2, 16, 64)),
    ]


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("at", range(4), ids=["bert", "t5", "vit", "whisper"])
def test_encoders(at: int) -> None:
    torch.manual_seed(0)
    model, made = _encoders()[at]
    model = model.eval().requires_grad_(False).cuda()
    compiled = lz.compile(model)
    with torch.no_grad():
        for seed in range(4):
            found, expected = compiled(made(seed)), model(made(seed))
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert is_captured(compiled)


def test_changed_weights_are_followed() -> None:
    model = nn.Sequential(nn.Linear(32, 300), nn.GELU(), nn.Linear(300, 4)).eval().cuda()
    x = torch.randn(5, 32, device="cuda")
    with torch.no_grad():
        compiled = lz.compile(model, x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        model[0] = nn.Linear(32, 300).eval().cuda()
        compiled.refresh()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


class Waiting(nn.Module):
    """A layer, a call that reads a number of the device, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.ops.layerzero_gpu_tests.waits(self.first(x)))
        return found


def test_what_waits_for_the_device_runs_between_graphs() -> None:
    @torch.library.custom_op("layerzero_gpu_tests::waits", mutates_args=())
    def waits(x: Tensor) -> Tensor:
        return x * float(x.flatten()[0].item())

    @waits.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    model, x = Waiting().eval().cuda(), torch.randn(3, 8, device="cuda")
    with torch.no_grad():
        compiled = lz.compile(model, x)
        for _ in range(4):
            y = torch.randn(3, 8, device="cuda")
            torch.testing.assert_close(compiled(y), model(y), rtol=1e-4, atol=1e-5)
    session = compiled._variants[0].session
    (sizes,) = session._known.values()
    assert sizes.captured is not None, sizes.refused
    assert [part.captured for part in sizes.captured.parts] == [True, False, True]
    # The process can go on capturing and computing.
    torch.cuda.synchronize()
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


def test_calls_on_several_streams_do_not_disturb_each_other() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).eval().cuda()
    inputs = [torch.randn(64, 256, device="cuda") for _ in range(16)]
    with torch.no_grad():
        compiled = lz.compile(model, inputs[0])
        expected = [model(x) for x in inputs]
        for _ in range(3):
            compiled(inputs[0])
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for at, x in enumerate(inputs):
            with torch.cuda.stream(streams[at % 4]):
                found.append(compiled(x))
        torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_what_is_refused() -> None:
    model, x = nn.Linear(8, 4).eval().cuda(), torch.randn(2, 8, device="cuda")
    with pytest.raises(lz.InvalidCallError, match="weights is for graphs on the CPU"):
        lz.compile(model, x, weights="int8")
    with pytest.warns(LayerZeroWarning, match="tune, precision: for graphs on the CPU only"):
        compiled = lz.compile(model, x, tune=True, precision="high")
    with pytest.raises(lz.InvalidCallError, match="files are for the CPU"):
        compiled.save("unwritten.plan")
    with pytest.warns(LayerZeroWarning, match="autocast"), torch.autocast("cuda", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    # The model's own call, and its own error.
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        compiled(x.cpu())
