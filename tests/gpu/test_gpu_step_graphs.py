"""Steps of models as CUDA graphs on a GPU: the tokens and logits of the steps without them."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch

pytest.importorskip("transformers")
from transformers_models_built import DECODERS, decoder, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_generated_tokens_are_the_same(name: str) -> None:
    model, ids = decoder(name, "eager").cuda(), tokens(2, 9).cuda()
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    masks = (None, padding)
    want = [model.generate(ids, attention_mask=mask, **HOW) for mask in masks]
    with lz.optimize(model, cuda_graphs=True) as optimized:
        for _ in range(2):
            got = [model.generate(ids, attention_mask=mask, **HOW) for mask in masks]
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), optimized.graphs
        assert optimized.graphs is not None
        fixed = model.generation_config.cache_implementation == "static" and name != "deepseek_v32"
        assert optimized.graphs.replayed > 20 or not fixed, optimized.graphs
    assert torch.equal(model.generate(ids, **HOW), want[0])


@torch.no_grad()
def test_a_step_without_a_cache_is_replayed() -> None:
    model = decoder("llama", "sdpa", torch.bfloat16).cuda()
    with lz.optimize(model, cuda_graphs=True) as optimized:
        for seed in range(6):
            ids = tokens(2, 16, seed).cuda()
            got, want = model(ids, use_cache=False).logits, type(model).forward(model, ids, use_cache=False).logits
            torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
        assert optimized.graphs is not None and optimized.graphs.replayed == 3, optimized.graphs


@torch.no_grad()
def test_two_streams_have_graphs_of_their_own() -> None:
    model = decoder("llama", "sdpa").cuda()
    ids = tokens(2, 16).cuda()
    want = model(ids, use_cache=False).logits
    with lz.optimize(model, cuda_graphs=True) as optimized:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(5):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    got = model(ids, use_cache=False).logits
                    stream.synchronize()
                    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert optimized.graphs is not None and optimized.graphs.captured == 2, optimized.graphs
