"""`lz.optimize(model, pack_weights=True)`: linear layers on a CPU multiply with packed copies of their weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero.integrations.models import packed_linears
from torch import nn
from transformers_models_built import decoder, tokens


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is twice as fast up to 16 rows, and half as fast beyond."""
    monkeypatch.setattr(packed_linears, "_timed", lambda _weight, _copy, rows: (2.0, 1.0 if rows <= 16 else 4.0))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with a copy."""
    made: list[int] = []
    real = packed_linears.linear

    def noted(input: Any, weight: Any, bias: Any) -> Any:
        made.append(input.numel() // input.shape[-1])
        return real(input, weight, bias)

    monkeypatch.setattr(packed_linears, "linear", noted)
    return made


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    """A model of one layer, without gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70, bias=bias, dtype=dtype)).requires_grad_(False)


def packed(model: nn.Module) -> Any:
    """The model with packed weights and nothing else replaced."""
    return lz.optimize(model, only=(), pack_weights=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_rows_are_multiplied_with_the_copy(dtype: torch.dtype, bias: bool, products: list[int]) -> None:
    model = layer(dtype, bias)
    weight, added = model[0].weight.double(), model[0].bias.double() if bias else None
    packed(model)
    for shape in [(40,), (3, 40), (2, 8, 40), (17, 40), (0, 40)]:
        x = torch.randn(*shape).to(dtype)
        want = F.linear(x.double(), weight, added)
        torch.testing.assert_close(model(x).double(), want, rtol=0, atol=0.05 if dtype != torch.float32 else 1e-5)
    assert products == [1, 3, 16, 0]


def test_the_copy_follows_its_weight(products: list[int]) -> None:
    model, x = layer(), torch.randn(2, 40)
    packed(model)
    model(x)
    model[0].weight.mul_(2.0)
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    model[0].weight.data = torch.randn(70, 40)
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    model.load_state_dict(layer().state_dict())
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    assert products == [2] * 4


def test_gradients_of_the_weight_are_those_of_the_layer(products: list[int]) -> None:
    model, plain, x = layer().requires_grad_(True), layer().requires_grad_(True), torch.randn(2, 40)
    packed(model)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert products == []
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    with torch.no_grad():
        model(x)
    assert products == [2]


def test_gradients_of_the_input_are_those_of_the_layer(products: list[int]) -> None:
    model, plain = layer(), layer()
    packed(model)
    mine, theirs = (torch.ones(2, 40, requires_grad=True) for _ in range(2))
    model(mine).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert products == [2]


def test_other_calls_are_the_layers_own(products: list[int]) -> None:
    model, x = layer(), torch.randn(2, 40)
    want = model(x)
    packed(model)
    other = {"0.weight": torch.ones(70, 40), "0.bias": torch.zeros(70)}
    called = torch.func.functional_call(model, other, (x,))
    torch.testing.assert_close(called, F.linear(x, other["0.weight"]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 41))
    assert products == []


def test_a_model_can_be_copied_stored_and_moved(products: list[int]) -> None:
    model, x = layer(), torch.randn(2, 40)
    want = model(x)
    optimized = packed(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other[0].weight.zero_()
        torch.testing.assert_close(model(x), want)
        torch.testing.assert_close(other(x), other[0].bias.expand(2, 70))
    model.double()
    assert model(x.double()).dtype == torch.float64
    model.float()
    torch.testing.assert_close(model(x), want)
    optimized.undo()
    assert "forward" not in vars(model[0]) and packed_linears._COPY not in vars(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_copies_may_be_integers(integers: str, dtype: torch.dtype, products: list[int]) -> None:
    model = layer(dtype)
    optimized = lz.optimize(model, only=(), pack_weights=integers)
    for rows in (1, 16, 17):
        x = torch.randn(rows, 40).to(dtype)
        # More rows than the copy is faster at are multiplied with the weight as it is.
        weight = model[0].weight if rows > 16 else lz.pack(model[0].weight, dtype=integers).unpack()
        want = F.linear(x.double(), weight.double(), model[0].bias.double())
        torch.testing.assert_close(model(x).double(), want, rtol=0, atol=0.05 if dtype != torch.float32 else 1e-5)
    assert products == [1, 16]
    (one,) = optimized.report.replaced
    assert f"70x40 {integers}, up to 16 rows" in one.note
    model[0].weight.mul_(2.0)
    x = torch.randn(2, 40).to(dtype)
    want = F.linear(x, lz.pack(model[0].weight, dtype=integers).unpack().to(dtype), model[0].bias)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0.05 if dtype != torch.float32 else 1e-5)


def test_a_weight_that_is_not_finite_is_not_rounded(products: list[int]) -> None:
    model, x = layer(), torch.randn(2, 40)
    lz.optimize(model, only=(), pack_weights="int8")
    model[0].weight[3, 4] = float("nan")
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias), equal_nan=True)
    model[0].weight[3, 4] = 0.0
    model(x)
    assert products == [2]
    broken = layer()
    broken[0].weight[3, 4] = float("inf")
    (kept,) = lz.optimize(broken, only=(), pack_weights="int4").report.kept
    assert "not finite" in kept.why


def test_other_integers_are_refused() -> None:
    with pytest.raises(lz.ConfigurationError, match="pack_weights is 'int3'") as raised:
        lz.optimize(layer(), pack_weights="int3")
    assert "'int8'" in raised.value.hint


def test_the_report_has_what_was_measured_and_what_it_costs() -> None:
    optimized = packed(nn.Sequential(layer(), layer()))
    (one,) = optimized.report.replaced
    assert (one.kind, one.name, one.count, one.operation) == ("packed weight", "Linear", 2, "linear")
    assert one.gain == {1: 2.0, 4: 2.0, 16: 2.0}
    # Three blocks of 32 outputs, 40 inputs each, 4 bytes a number.
    assert one.note == f"70x40, up to 16 rows, {2 * 3 * 32 * 40 * 4 / 1e6:,.1f} MB of copies"


def test_what_is_not_packed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(model: nn.Module) -> str:
        (one,) = packed(model).report.kept
        return one.why.removeprefix("packed weight: ")

    assert why(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))) == "its weight is float64"
    assert why(nn.Sequential(nn.Linear(4, 4, device="meta"))).startswith("its weight is on meta")
    with torch.inference_mode():
        made = nn.Sequential(nn.Linear(4, 4))
    assert why(made).startswith("its weight was made in inference mode")
    monkeypatch.setattr(packed_linears, "_timed", lambda *_: (1.0, 1.0))
    packings: list[Any] = []
    pack = packed_linears.pack
    monkeypatch.setattr(packed_linears, "pack", lambda weight, **how: packings.append(weight) or pack(weight, **how))
    model = nn.Sequential(layer(), layer())
    assert why(model) == "the product with the weight as it is was as fast here"
    assert not any("forward" in vars(module) for module in model.modules())
    # The second layer has the size of the first, which gained nothing.
    assert len(packings) == 1


def test_sizes_are_measured_once_and_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    known: packed_linears.Known = {}
    packed_linears.packed(layer()[0], known)
    ((key, gains),) = known.items()
    assert key[:3] == (70, 40, torch.float32) and 1 in gains and all(gain > 0 for gain in gains.values())
    monkeypatch.setattr(packed_linears, "_timed", lambda *_: pytest.fail("measured again"))
    packed_linears.packed(layer()[0], known)


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("fuse_qkv", [False, True])
@torch.no_grad()
def test_a_decoder_gives_the_same_tokens(fuse_qkv: bool, products: list[int]) -> None:
    model: Any = decoder("llama", "sdpa")
    prompt = tokens(1, 9)
    want = model(prompt).logits
    generated = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with lz.patched(model, pack_weights=True, fuse_qkv=fuse_qkv):
        torch.testing.assert_close(model(prompt).logits, want, rtol=0, atol=2e-5)
        products.clear()
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), generated)
        assert set(products) == {1, 9}
    products.clear()
    model(prompt)
    assert products == []
