"""`lz.optimize(model, fuse_qkv=True)`: one product for query, key and value, as long as that is what the model means."""

from __future__ import annotations

import copy
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero.integrations.models import projections
from torch import nn
from transformers_models_built import OTHERS, decoder, randomized, tokens

CLOSE = 2e-5
#: Whose forward calls the three projections one after the other: with and without norms after them, and biases.
FUSED = ["llama", "qwen2", "qwen3", "gemma3", "phi", "gpt_oss", "mixtral"]

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights of each product for query, key and value together."""
    made: list[tuple[int, ...]] = []
    real = projections.linear

    def noted(x: Any, weight: Any, bias: Any) -> Any:
        made.append(tuple(weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(projections, "linear", noted)
    return made


def is_decorated(model: Any) -> bool:
    """Whether this version of transformers decorates the forward of attention modules, whose source is not read then."""
    kind = type(model.model.layers[0].self_attn)
    return projections._rewritten(kind) is None


def fused(model: Any, **more: Any) -> Any:
    """The model with its projections fused and nothing else replaced."""
    optimized = lz.optimize(model, only=(), fuse_qkv=True, **more)
    if not optimized.report.replaced and is_decorated(model):
        pytest.skip("this version of transformers decorates the forward of its attention modules")
    return optimized


def reasons(optimized: Any) -> set[str]:
    """Why projections stay as they were."""
    return {one.why.removeprefix("QKV: ") for one in optimized.report.kept if one.why.startswith("QKV: ")}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a decoder gives."""
    out: torch.Tensor = model(tokens(2, 11)).logits
    return out


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_one_product_gives_what_three_give(name: str, products: list[Any]) -> None:
    model, ids = decoder(name, "eager"), tokens(2, 12)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before, text = logits(model), model.generate(ids, **how)
    kept = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with fused(model) as optimized:
        assert [(one.kind, one.operation, one.count) for one in optimized.report.replaced] == [
            ("QKV projections", "linear", 2)
        ]
        assert float((logits(model) - before).abs().max()) < CLOSE
        assert len(products) == 2
        # The heads of query, key and value together.
        assert products[0][0] > products[0][1]
        assert torch.equal(model.generate(ids, **how), text)
        assert all(torch.equal(kept[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), before)
    addresses = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert not any("_lz_block" in vars(module) for module in model.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_on_a_gpu(name: str, products: list[Any]) -> None:
    model, ids = decoder(name, "sdpa" if name != "gpt_oss" else "eager").cuda(), tokens(2, 12).cuda()
    before = model(ids).logits
    with fused(model):
        assert float((model(ids).logits - before).abs().max()) < 1e-3
    assert len(products) == 2
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["bert", "vit"])
@torch.no_grad()
def test_encoders_too(name: str, products: list[Any]) -> None:
    (config, kind), given = OTHERS[name]()
    model = randomized(kind._from_config(config, attn_implementation="eager"))
    before = model(**given).logits
    with lz.patched(model, only=(), fuse_qkv=True) as optimized:
        if not optimized.report.replaced:
            pytest.skip(
                "this version of transformers decorates the forward of its attention modules, or names them otherwise"
            )
        assert float((model(**given).logits - before).abs().max()) < CLOSE
    assert len(products) == 2


def test_the_weights_need_no_more_memory() -> None:
    model = decoder("llama", "eager")
    before = sum(p.untyped_storage().nbytes() for p in model.parameters())
    with fused(model):
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == before


def test_it_is_off_unless_asked_for(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    with lz.patched(model) as optimized:
        logits(model)
        assert "QKV projections" not in {one.kind for one in optimized.report.replaced}
    assert not products


@torch.no_grad()
def test_a_write_to_a_parameter_is_seen(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    with fused(model):
        for module in model.model.layers:
            module.self_attn.k_proj.weight.mul_(1.5)
        inside = logits(model)
        assert products
    assert torch.equal(logits(model), inside) or float((logits(model) - inside).abs().max()) < CLOSE


@torch.no_grad()
def test_a_parameter_that_was_replaced_is_seen(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    with fused(model):
        for module in model.model.layers:
            projection = module.self_attn.v_proj
            projection.weight.data = projection.weight.data * 2
        inside = logits(model)
    assert not products
    assert torch.equal(logits(model), inside)


@torch.no_grad()
def test_a_model_that_was_moved_or_copied(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    with fused(model):
        copied = copy.deepcopy(model)
        copied.model.layers[0].self_attn.q_proj.weight.zero_()
        assert float((logits(copied) - logits(model)).abs().max()) > 1e-3
        assert len(products) == 2
        model.double()
        assert logits(model).dtype == torch.float64
        assert len(products) == 2
    expected = decoder("llama", "eager")
    expected.model.layers[0].self_attn.q_proj.weight.zero_()
    assert float((logits(copied) - logits(expected)).abs().max()) < CLOSE


class Adapter(nn.Module):
    """A projection with something added to it, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight = base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 1.0
        return out


@torch.no_grad()
def test_an_adapter_is_never_left_out(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    for module in model.model.layers:
        module.self_attn.q_proj = Adapter(module.self_attn.q_proj)
    expected = logits(model)
    with lz.patched(model, only=(), fuse_qkv=True) as optimized:
        assert not optimized.report.replaced
        if not is_decorated(model):
            assert reasons(optimized) == {
                "its projections are Adapter, not Linear: quantized, or wrapped by an adapter"
            }
    # Wrapped afterwards.
    model = decoder("llama", "eager")
    with fused(model):
        for module in model.model.layers:
            module.self_attn.q_proj = Adapter(module.self_attn.q_proj)
        assert float((logits(model) - expected).abs().max()) < CLOSE
    assert not products


def test_hooks_see_their_projection(products: list[Any]) -> None:
    model = decoder("llama", "eager")
    with fused(model):
        seen: list[tuple[int, ...]] = []
        projection = model.model.layers[0].self_attn.k_proj
        handle = projection.register_forward_hook(lambda _module, _given, out: seen.append(tuple(out.shape)))
        logits(model)
        assert seen == [(2, 11, 32)]
        assert len(products) == 1
        handle.remove()
        logits(model)
        assert len(products) == 3


def test_gradients_of_the_weights_are_there(products: list[Any]) -> None:
    found = []
    for together in (False, True):
        model, ids = decoder("llama", "eager"), tokens(2, 9)
        done = fused(model) if together else None
        model(ids, labels=ids).loss.backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        if done is not None:
            done.undo()
    assert found[0].keys() == found[1].keys()
    assert all(float((found[0][key] - found[1][key]).abs().max()) < CLOSE for key in found[0])
    assert not products


@pytest.mark.parametrize("transform", ["none", "grad", "vmap"])
def test_functional_calls_use_the_weights_they_are_given(transform: str, products: list[Any]) -> None:
    model = decoder("llama", "eager")
    other = {name: 2.0 * parameter.detach() for name, parameter in model.named_parameters()}
    ids = tokens(2, 11)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, weights, (ids,)).logits
        return out.square().mean()

    def transformed() -> Any:
        if transform == "none":
            return loss(other)
        if transform == "grad":
            return torch.func.grad(loss)(other)["model.embed_tokens.weight"]
        return torch.func.vmap(loss)({name: torch.stack([value, value / 2]) for name, value in other.items()})

    expected, before = transformed(), logits(model)
    with fused(model):
        products.clear()
        assert torch.allclose(transformed(), expected, rtol=1e-4, atol=1e-5)
        assert not products
        # The model's own weights are where they were.
        assert torch.allclose(logits(model), before, atol=CLOSE)
        assert products


def test_compiled_as_one_graph() -> None:
    model = decoder("llama", "eager")
    before = logits(model)
    with fused(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert float((logits(compiled) - before).abs().max()) < CLOSE


def tied(model: Any) -> None:
    """The keys of one layer are those of the other."""
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight


def one_bias(model: Any) -> None:
    """One projection has a bias."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.ones(64))


def another_dtype(model: Any) -> None:
    """One projection has another dtype."""
    for layer in model.model.layers:
        layer.self_attn.v_proj.to(torch.float64)


def watched(model: Any) -> None:
    """Somebody looks at a projection."""
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (tied, "its weights share their memory with others"),
        (one_bias, "only some of its projections have a bias"),
        (another_dtype, "its projections differ in dtype, device or width of the input"),
        (watched, "its projections have hooks"),
        (lambda model: model.to("meta"), "its weights have no memory (on the meta device)"),
    ],
    ids=["tied", "bias", "dtype", "hooks", "meta"],
)
def test_what_cannot_be_fused_is_listed(change: Any, why: str) -> None:
    model = decoder("llama", "eager")
    if is_decorated(model):
        pytest.skip("this version of transformers decorates the forward of its attention modules")
    change(model)
    with lz.patched(model, only=(), fuse_qkv=True) as optimized:
        assert not optimized.report.replaced
        assert reasons(optimized) == {why}


def test_projections_of_different_inputs_stay() -> None:
    (config, kind), _ = OTHERS["whisper"]()
    with lz.patched(kind(config), only=(), fuse_qkv=True) as optimized:
        assert not optimized.report.replaced
        assert reasons(optimized) == {"its forward does not call the three projections one after the other"}
