"""`lz.compile(…, weights=…)`: linear layers with narrow weights, how far off they are, and how large."""

import layerzero as lz
import pytest
import torch
from layerzero.errors import InvalidCallError
from torch import nn


class Layers(nn.Module):
    """Linear layers with and without bias, activation and residual, and a product with a transposed weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.table = nn.Parameter(torch.randn(128, 96) / 10)

    def forward(self, x):
        return (x + self.down(nn.functional.gelu(self.up(x)))) @ self.table


def _made():
    torch.manual_seed(0)
    return Layers().eval(), torch.randn(3, 5, 128)


#: The largest error, and how much smaller weights are than in float32.
CASES = [("bfloat16", 1e-2, 1.9), ("int8", 2e-2, 3.8), ("int4", 0.2, 6.5)]


@pytest.mark.parametrize(("weights", "most", "smaller"), CASES)
def test_results_are_near_and_weights_smaller(weights, most, smaller):
    model, x = _made()
    compiled = lz.compile(model, x, weights=weights)
    with torch.no_grad():
        expected, found = model(x), compiled(x)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert 0 < error < most
    report = compiled.report()
    assert report.largest_error == pytest.approx(error, rel=1e-3)
    assert report.weights == weights
    assert report.weight_bytes == 4 * (128 * 256 * 2 + 128 * 96)
    assert report.packed_bytes * smaller < report.weight_bytes
    assert not report.slow_steps
    assert f"weights in {weights}" in str(report)
    products = [step for step in compiled.explain() if step.op in ("linear", "matmul")]
    assert len(products) == 3
    # Nothing reads the wide weights, not even after a failure, but the reference.
    for step in products:
        names = [name for name in step.candidates if not name.startswith(("reference", "lz_cpu.ref."))]
        kind = "linear_packed" if weights == "bfloat16" else f"linear_{weights}"
        assert names
        assert all(kind in name for name in names), names


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounding_is_that_of_pack(weights):
    torch.manual_seed(1)
    layer, x = nn.Linear(130, 70), torch.randn(4, 130)
    packed = lz.pack(layer.weight, dtype=weights)
    with torch.no_grad():
        expected = lz.linear(x, packed, layer.bias)
        found = lz.compile(layer.eval(), x, weights=weights)(x)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)


def test_weights_that_cannot_be_rounded_stay():
    model, x = _made()
    with torch.no_grad():
        model.up.weight[0, 0] = torch.inf
        x[..., 0] = 0.5
        expected = model(x)
    compiled = lz.compile(model, x, weights="int8")
    up = next(step for step in compiled.explain() if step.op == "linear")
    assert "int8" not in up.kernel
    with torch.no_grad():
        assert torch.equal(compiled(x).isnan(), expected.isnan())


def test_plans_keep_them(tmp_path):
    model, x = _made()
    compiled = lz.compile(model, x, weights="int8")
    loaded = lz.load_plan(compiled.save(tmp_path / "narrow.plan"))
    with torch.no_grad():
        assert torch.equal(loaded(x), compiled(x))
    assert loaded.report().weights == "int8"


def test_exports_share_packed_weights():
    # One layer, which no pass makes another weight of.
    model, x = nn.Linear(64, 32).eval(), torch.randn(5, 64)
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        before = compiled.report().packed_bytes
        compiled(x[:2])
    assert compiled.report().exports == 2
    assert compiled.report().packed_bytes == before
    assert compiled.report().largest_error is None


def test_other_numbers_are_refused():
    with pytest.raises(InvalidCallError, match="bfloat16, int8, int4"):
        lz.compile(*_made(), weights="int3")
