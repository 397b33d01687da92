"""Attention of diffusers by LayerZero: the results of diffusers' own, and the models as they were afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models import activations, attention_dispatch
from diffusers.models import attention_processor as theirs
from diffusers_models_built import MODELS, unet, unet_inputs
from layerzero.integrations._diffusers import attention as diffusers_attention
from layerzero.integrations._diffusers import backend as diffusers_backend
from layerzero.integrations.diffusers import (
    LayerZeroAttnProcessor,
    LayerZeroJointAttnProcessor,
    register_with_diffusers,
    unregister_from_diffusers,
)

CLOSE = 3e-5
Registry = attention_dispatch._AttentionBackendRegistry
Names = attention_dispatch.AttentionBackendName


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Every test begins with the backend registered, not chosen, and with no warning given yet."""
    register_with_diffusers()
    diffusers_attention._said.clear()
    active = Registry._active_backend
    yield
    Registry._active_backend = active


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `lz.attention` was called with for models of diffusers."""
    made: list[dict[str, Any]] = []
    real = diffusers_attention.attention

    def noted(query: Any, key: Any, value: Any, causal: bool, scale: Any, **given: Any) -> Any:
        made.append({"queries": query.shape[1], "keys": key.shape[1], "causal": causal, **given})
        return real(query, key, value, causal, scale, **given)

    monkeypatch.setattr(diffusers_attention, "attention", noted)
    return made


@torch.no_grad()
def result(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """What a model gives, as one tensor."""
    out: torch.Tensor = model(**given, return_dict=False)[0]
    return out


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in the size of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def kept(optimized: Any) -> dict[str, int]:
    """Why attention modules stay as they were, with their number."""
    return {one.why: one.count for one in optimized.report.kept if one.why.startswith("attention: ")}


def processors(model: Any) -> list[type]:
    """The classes of a model's processors."""
    return [type(module.processor) for module in model.modules() if hasattr(module, "set_processor")]


@pytest.mark.parametrize("name", MODELS)
def test_optimized_attention_gives_what_diffusers_gives(name: str, calls: list[dict[str, Any]]) -> None:
    build, classes, _ = MODELS[name]
    model, given = build()
    before, was, active = result(model, given), processors(model), Registry._active_backend
    assert float(before.std()) > 1e-3
    with lz.patched(model, only=("attention",)) as optimized:
        served = {one.name: one.count for one in optimized.report.replaced}
        assert served.keys() == classes
        assert sum(served.values()) == len(was)
        inside = result(model, given)
        assert len(calls) == len(was)
        # Nothing is chosen for other models.
        assert Registry._active_backend == active
    assert apart(inside, before) < CLOSE
    assert processors(model) == was
    assert torch.equal(result(model, given), before)
    assert len(calls) == len(was)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_the_model_gives_what_diffusers_gives(name: str, dtype: torch.dtype) -> None:
    def there(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: there(one) for key, one in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        return value.to("cuda", dtype if value.is_floating_point() else None)

    model, given = MODELS[name][0]()
    model, given = model.to("cuda", dtype), there(given)
    before = result(model, given)
    with lz.patched(model):
        inside = result(model, given)
    assert apart(inside.float(), before.float()) < (1e-3 if dtype is torch.float32 else 5e-2)
    assert torch.equal(result(model, given), before)


@pytest.mark.parametrize("name", MODELS)
def test_everything_else_that_is_optimized_gives_the_same(name: str) -> None:
    model, given = MODELS[name][0]()
    before = result(model, given)
    with lz.patched(model) as optimized:
        assert {"attention"} < {one.operation for one in optimized.report.replaced}
        assert apart(result(model, given), before) < CLOSE
    assert torch.equal(result(model, given), before)


@pytest.mark.parametrize("name", [name for name, (_, _, by_backend) in MODELS.items() if by_backend])
def test_the_backend_gives_what_native_gives(name: str, calls: list[dict[str, Any]]) -> None:
    model, given = MODELS[name][0]()
    before = result(model, given)
    model.set_attention_backend("layerzero")
    assert apart(result(model, given), before) < CLOSE
    assert len(calls) == len(processors(model))
    model.set_attention_backend("native")
    assert torch.equal(result(model, given), before)
    with attention_dispatch.attention_backend("layerzero"):
        model.reset_attention_backend()
        assert apart(result(model, given), before) < CLOSE
    assert len(calls) == 2 * len(processors(model))


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("unet_masked", LayerZeroAttnProcessor),
        ("pixart", LayerZeroAttnProcessor),
        ("sd3", LayerZeroJointAttnProcessor),
    ],
)
def test_a_processor_for_the_whole_model(name: str, processor: type, calls: list[dict[str, Any]]) -> None:
    model, given = MODELS[name][0]()
    before = result(model, given)
    model.set_attn_processor(processor())
    assert set(processors(model)) == {processor}
    assert apart(result(model, given), before) < CLOSE
    assert len(calls) == len(processors(model))


def test_self_and_cross_attention_with_a_mask(calls: list[dict[str, Any]]) -> None:
    model, given = MODELS["unet_masked"][0]()
    unmasked = {name: argument for name, argument in given.items() if name != "encoder_attention_mask"}
    with lz.patched(model, only=("attention",)):
        masked = result(model, given)
        shapes = {(one["queries"], one["keys"], one["attn_mask"] is not None) for one in calls}
        assert apart(result(model, unmasked), masked) > 1e-3
    # A picture of 8 · 8 and of 4 · 4; a text of 5.
    assert {(64, 64, False), (64, 5, True), (16, 16, False), (16, 5, True)} >= shapes
    assert {keys for _, keys, _ in shapes} >= {64, 5}


def test_projections_that_diffusers_has_fused() -> None:
    model = unet()
    before = result(model, unet_inputs())
    model.fuse_qkv_projections()
    with lz.patched(model, only=("attention",)) as optimized:
        assert not kept(optimized)
        assert apart(result(model, unet_inputs()), before) < CLOSE


def test_gradients_are_those_of_native() -> None:
    found = []
    for ours in (False, True):
        model, given = MODELS["unet_masked"][0]()
        if ours:
            lz.optimize(model, only=("attention",))
        model(**given, return_dict=False)[0].square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_compiled_as_one_graph(name: str) -> None:
    model, given = MODELS[name][0]()
    before = result(model, given)
    with lz.patched(model, only=("attention",)):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert apart(result(compiled, given), before) < CLOSE


def test_added_key_and_value_projections_stay_as_they_were() -> None:
    model = unet(
        down_block_types=("SimpleCrossAttnDownBlock2D", "DownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("UpBlock2D", "SimpleCrossAttnUpBlock2D"),
    )
    before, was = result(model, unet_inputs()), processors(model)
    assert theirs.AttnAddedKVProcessor2_0 in was
    with lz.patched(model, only=("attention",)) as optimized:
        assert processors(model) == was
        assert torch.equal(result(model, unet_inputs()), before)
    why = "attention: its processor is AttnAddedKVProcessor2_0, which computes attention itself"
    assert kept(optimized) == {why: len(was)}
    model.set_attn_processor(LayerZeroAttnProcessor())
    with pytest.raises(lz.InvalidCallError, match=r"does not serve added key and value projections"):
        result(model, unet_inputs())


def test_processors_of_adapters_stay_as_they_were() -> None:
    model = unet()
    adapted = theirs.IPAdapterAttnProcessor2_0(hidden_size=16, cross_attention_dim=24, num_tokens=(4,))
    module = next(m for m in model.modules() if isinstance(m, theirs.Attention) and m.is_cross_attention)
    module.set_processor(adapted)
    with lz.patched(model, only=("attention",)) as optimized:
        assert module.processor is adapted
        assert sum(one.count for one in optimized.report.replaced) == len(processors(model)) - 1
        why = "attention: its processor is IPAdapterAttnProcessor2_0, which computes attention itself"
        assert kept(optimized) == {why: 1}
    # Set by hand, the processor says what it does not serve.
    module.set_processor(LayerZeroAttnProcessor())
    states, text = torch.randn(1, 4, 16), torch.randn(1, 5, 24)
    with pytest.raises(lz.InvalidCallError, match=r"the embeddings of an IP-Adapter"):
        module(states, encoder_hidden_states=(text, [text]))
    with pytest.raises(lz.InvalidCallError, match=r"the argument ip_adapter_masks"):
        module(states, encoder_hidden_states=text, ip_adapter_masks=[torch.ones(1)])


@torch.no_grad()
def test_scores_in_float32_stay_as_they_were() -> None:
    attention = theirs.Attention(16, heads=2, dim_head=8, upcast_attention=True, processor=theirs.AttnProcessor())
    plain = theirs.Attention(16, heads=2, dim_head=8, scale_qk=False)
    model = torch.nn.ModuleList([attention, plain])
    states = torch.randn(2, 6, 16)
    assert type(plain.processor) is theirs.AttnProcessor
    before = plain(states)
    with lz.patched(model, only=("attention",)) as optimized:
        assert [type(m.processor) for m in model] == [theirs.AttnProcessor, LayerZeroAttnProcessor]
        # Its scale is 1.
        assert apart(plain(states), before) < CLOSE
    assert kept(optimized) == {"attention: scores in float32 by its own setting": 1}


def test_arguments_of_other_processors_are_refused() -> None:
    attention = theirs.Attention(16, heads=2, dim_head=8, processor=LayerZeroAttnProcessor())
    states = torch.randn(1, 4, 16)
    # diffusers drops arguments that a processor does not name, so these are named.
    for name in ("image_rotary_emb", "rotary_emb", "query_rotary_emb", "key_rotary_emb", "ip_hidden_states"):
        with pytest.raises(lz.InvalidCallError, match=rf"the argument {name}"):
            attention(states, **{name: torch.ones(1)})
    # CogVideoX's processor concatenates them: another result, from the same module.
    with pytest.raises(lz.InvalidCallError, match=r"a module without cross-attention"):
        attention(states, encoder_hidden_states=states)
    shared = theirs.Attention(16, heads=4, kv_heads=2, dim_head=4, processor=LayerZeroAttnProcessor())
    with pytest.raises(lz.InvalidCallError, match=r"fewer key/value heads"):
        shared(states)
    causal = theirs.Attention(16, heads=2, dim_head=8, is_causal=True, processor=LayerZeroAttnProcessor())
    with pytest.raises(lz.InvalidCallError, match=r"causal attention"):
        causal(states)
    joint = theirs.Attention(16, heads=2, dim_head=8, processor=LayerZeroJointAttnProcessor())
    with pytest.raises(lz.InvalidCallError, match=r"the argument attention_mask"):
        joint(states, attention_mask=torch.zeros(1, 1, 4))


def test_a_processor_that_somebody_sets_meanwhile_is_kept() -> None:
    model = unet()
    optimized = lz.optimize(model, only=("attention",))
    module = next(m for m in model.modules() if isinstance(m, theirs.Attention))
    mine = theirs.AttnProcessor2_0()
    module.set_processor(mine)
    optimized.undo()
    assert module.processor is mine
    assert set(processors(model)) == {theirs.AttnProcessor2_0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("build", "operation"),
    [
        (lambda: activations.GELU(16, 24), "gelu"),
        (lambda: activations.GELU(16, 24, approximate="tanh"), "gelu"),
        (lambda: activations.SwiGLU(16, 24), "silu_mul"),
    ],
    ids=["exact", "tanh", "gated"],
)
@torch.no_grad()
def test_activations_with_their_projection(build: Any, operation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = build().to(dtype)
    x = torch.randn(3, 5, 16, dtype=dtype)
    before = module(x)
    with lz.patched(module) as optimized:
        assert [one.operation for one in optimized.report.replaced] == [operation]
        assert apart(module(x).float(), before.float()) < (CLOSE if dtype is torch.float32 else 2e-2)
    assert torch.equal(module(x), before)


def test_what_has_no_operation_is_listed() -> None:
    with lz.patched(unet()) as optimized:
        why = {one.name: one.why for one in optimized.report.kept}
    assert why["GEGLU"].startswith("LayerZero has no operation for GEGLU")
    assert why["GroupNorm"] == "LayerZero has no group norm"
    assert why["Conv2d"] == "LayerZero has no convolutions"


# The function of the backend.


def states(batch: int, queries: int, keys: int, heads: int = 4, shared: int = 4) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((queries, heads), (keys, shared), (keys, shared))
    return tuple(torch.randn(batch, length, count, 8, generator=generator) for length, count in sizes)


def both(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of diffusers' dispatcher by LayerZero and by torch."""
    dispatch = attention_dispatch.dispatch_attention_fn
    return dispatch(*given, backend="layerzero", **named), dispatch(*given, backend="native", **named)


def allowed(*shape: int) -> torch.Tensor:
    """A mask of bools. Every query may attend to the first key."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(6)) > 0.4
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(
    "shape", [(3, 4, 6, 7), (3, 1, 6, 7), (1, 1, 6, 7), (3, 1, 1, 7), (4, 6, 7), (1, 6, 7), (6, 7), (1, 7)], ids=str
)
@pytest.mark.parametrize("added", [False, True])
def test_masks_mean_what_they_mean_to_native(shape: tuple[int, ...], added: bool, calls: list[Any]) -> None:
    mask = allowed(*shape)
    if added:
        mask = torch.zeros(shape).masked_fill(~mask, float("-inf")) + torch.linspace(0, 1, shape[-1])
    ours, native = both(*states(3, 6, 7), attn_mask=mask)
    assert apart(ours, native) < 1e-5
    assert len(calls) == 1


def test_a_mask_of_keys_by_sequence() -> None:
    query, key, value = states(3, 6, 7)
    mask = allowed(3, 7)
    ours = attention_dispatch.dispatch_attention_fn(query, key, value, attn_mask=mask, backend="layerzero")
    expected = attention_dispatch.dispatch_attention_fn(
        query, key, value, attn_mask=mask[:, None, None, :], backend="native"
    )
    assert apart(ours, expected) < 1e-5


def test_a_mask_that_two_versions_read_differently_is_read_by_diffusers(calls: list[Any]) -> None:
    with pytest.warns(lz.LayerZeroWarning, match=r"two dimensions for as many queries as sequences \(6\)"):
        ours, native = both(*states(6, 6, 7), attn_mask=allowed(6, 7))
    assert torch.equal(ours, native)
    assert not calls


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 9), (9, 6), (1, 5)])
def test_causal_attention_is_aligned_as_torchs(queries: int, keys: int) -> None:
    ours, native = both(*states(2, queries, keys), is_causal=True)
    assert apart(ours, native) < 1e-5


def test_shared_heads_and_a_scale(calls: list[Any]) -> None:
    ours, native = both(*states(2, 6, 7, shared=2), enable_gqa=True, scale=0.2, attn_mask=allowed(2, 1, 6, 7))
    assert apart(ours, native) < 1e-5
    assert len(calls) == 1
    for backend in ("layerzero", "native"):
        with pytest.raises((lz.InvalidCallError, RuntimeError)):
            attention_dispatch.dispatch_attention_fn(*states(2, 6, 7, shared=2), backend=backend)


def test_an_unknown_mask_runs_in_native_with_a_warning(calls: list[Any]) -> None:
    mask = torch.ones(2, 4, 6, 1, dtype=torch.bool)
    with pytest.warns(lz.LayerZeroWarning, match=r"a mask of the form \[2, 4, 6, 1\] of bool is not served"):
        ours, native = both(*states(2, 6, 7), attn_mask=mask)
    assert torch.equal(ours, native)
    # Of whole numbers: torch refuses it, whoever is asked.
    with pytest.warns(lz.LayerZeroWarning, match=r"of int64"), pytest.raises(RuntimeError):
        both(*states(2, 6, 7), attn_mask=torch.ones(6, 7, dtype=torch.int64))
    assert not calls


def test_dropout_draws_as_native_does(calls: list[Any]) -> None:
    torch.manual_seed(3)
    ours = attention_dispatch.dispatch_attention_fn(*states(2, 6, 7), dropout_p=0.3, backend="layerzero")
    torch.manual_seed(3)
    native = attention_dispatch.dispatch_attention_fn(*states(2, 6, 7), dropout_p=0.3, backend="native")
    assert torch.equal(ours, native)
    assert not calls


def test_the_function_has_every_argument_of_native() -> None:
    known = Registry._supported_arg_names
    assert known[Names.NATIVE] <= known[Names("layerzero")]


# Registering.


def test_registering_is_undone() -> None:
    unregister_from_diffusers()
    members, backends = dict(Names.__members__), set(Registry.list_backends())
    assert "LAYERZERO" not in members
    register_with_diffusers()
    register_with_diffusers()
    assert Names("layerzero") is Names.LAYERZERO
    assert [name for name in Names.__members__ if name not in members] == ["LAYERZERO"]
    assert [one for one in Names if one.value == "layerzero"] == [Names.LAYERZERO]
    assert set(Registry.list_backends()) - backends == {Names.LAYERZERO}
    Registry._active_backend = Names.LAYERZERO
    unregister_from_diffusers()
    unregister_from_diffusers()
    assert dict(Names.__members__) == members
    assert set(Registry.list_backends()) == backends
    assert Registry._active_backend == Names.NATIVE
    with pytest.raises(ValueError, match="layerzero"):
        Names("layerzero")
    assert not hasattr(Names, "LAYERZERO")
    register_with_diffusers()
    assert diffusers_backend.member() is Names.LAYERZERO


def test_an_old_diffusers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.__version__", "0.34.0")
    with pytest.raises(lz.ConfigurationError, match=r"diffusers 0\.34\.0 has no attention backends") as caught:
        lz.register_with_diffusers()
    assert caught.value.code == "OLD_DIFFUSERS"


def test_importing_layerzero_does_not_import_diffusers() -> None:
    code = "import layerzero, torch, sys; assert 'diffusers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
