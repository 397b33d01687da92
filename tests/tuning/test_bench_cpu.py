"""`layerzero bench cpu`: both sides of a row compute the same, and the figures follow from the times."""

from __future__ import annotations

import json

import pytest
import torch
from layerzero.bench import cpu, cpu_peers

#: How far results of a dtype may be apart, of the largest number.
APART = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def test_both_sides_of_every_row_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounding millions of weights is not what is tested here.
    monkeypatch.setattr(cpu, "QUANTIZED", ((256, 70),))
    found = set()
    for dtype, case in cpu.cases():
        ours, theirs = case.lz().double(), case.torch().double()
        assert ours.shape == theirs.shape, (case.kind, case.shape)
        assert case.moved > 0 and case.which().kernel_id
        found.add((dtype, case.kind.partition(",")[0]))
        if case.kind.startswith("sample_") and case.kind != "sample_topk, 1":
            continue  # They draw different tokens.
        off = float((ours - theirs).abs().max() / theirs.abs().max())
        assert off <= APART[dtype], (case.kind, dtype, case.shape, off)
    functions = {
        "rms_norm",
        "layer_norm",
        "gelu",
        "softmax",
        "silu_mul",
        "embedding",
        "dequantize",
        "attention",
        "paged_attention",
        "linear",
        "linear_quantized",
        "sample_topk",
        "sample_topp",
    }
    assert found == {(dtype, function) for dtype in cpu.DTYPES for function in functions}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small vocabulary, and kinds of calls that are not asked for left out: making their numbers takes seconds."""
    monkeypatch.setattr(cpu, "VOCABULARIES", (300,))
    for name in ("LINEARS", "PRODUCTS", "QUANTIZED", "DECODES", "PREFILLS"):
        monkeypatch.setattr(cpu, name, ())


@pytest.mark.usefixtures("small")
def test_the_command_prints_rows_of_the_functions_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["--json", "--rounds", "1", "--functions", "embedding"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in result["rows"]} == {"embedding"} and result["threads"] >= 1
    for row in result["rows"]:
        assert row["spread"][0] <= row["speedup"] <= row["spread"][1] and row["off"] == 0.0
        assert min(row["lz_us"], row["torch_us"], row["floor_us"]) > 0.0
    assert cpu.main(["--rounds", "1", "--functions", "embedding"]) == 0
    assert "lz_cpu.embedding" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cpu.main(["--rounds", "0"])


def test_peers_compute_the_same_and_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are installed; MKL and oneDNN come with torch on most machines."""
    for name, sizes in (("NORMS", ((3, 96),)), ("ACTIVATIONS", ((3, 96),)), ("SOFTMAXES", ((5, 33),))):
        monkeypatch.setattr(cpu, name, sizes)
    for name, sizes in (("LINEARS", ((3, 40, 24),)), ("PRODUCTS", ((3, 40, 24),))):
        monkeypatch.setattr(cpu, name, sizes)
    for name, sizes in (("PREFILLS", ((1, 2, 24, 16),)), ("DECODES", ((1, 2, 2, 32, 16),))):
        monkeypatch.setattr(cpu, name, sizes)
    monkeypatch.setattr(cpu, "QUANTIZED", ())
    functions = "rms_norm,layer_norm,gelu,softmax,linear,attention"
    assert cpu.main(["--json", "--rounds", "1", "--functions", functions, "--peers", ",".join(cpu_peers.PEERS)]) == 0
    result = json.loads(capsys.readouterr().out)
    for row in result["rows"]:
        for name, peer in row["peers"].items():
            assert peer["off"] <= APART[row["dtype"]] and peer["us"] > 0.0 and peer["speedup"] > 0.0, (
                row["kind"],
                name,
            )
    seen = {name for row in result["rows"] for name in row["peers"]}
    assert {"mkl"} & seen == ({"mkl"} if torch.backends.mkl.is_available() else set())
    assert {"onednn"} & seen == ({"onednn"} if torch.backends.mkldnn.is_available() else set())
    assert set(result["summary"]["peers"]) == seen
    assert cpu.main(["--rounds", "1", "--functions", "softmax", "--peers", "onednn"]) == 0
    assert ("over onednn" in capsys.readouterr().out) == torch.backends.mkldnn.is_available()
    with pytest.raises(SystemExit):
        cpu.main(["--peers", "blis"])
    assert "no peer is called blis; there are mkl, onednn, openvino" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_backend_can_be_preferred(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["--json", "--rounds", "1", "--functions", "sample_topk", "--prefer", "lz_cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prefer"] == "lz_cpu" and result["rows"]
    assert {row["kernel_id"].rpartition(".")[0].removesuffix(".sample_topk") for row in result["rows"]} == {"lz_cpu"}
    assert all(row["off"] is None for row in result["rows"])


def test_the_summary_counts() -> None:
    def row(speedup: float, dtype: str, torch_us: float, kernel: str) -> dict[str, object]:
        return {"speedup": speedup, "dtype": dtype, "torch_us": torch_us, "kernel_id": kernel, "peers": {}}

    rows = [row(4.0, "float32", 10.0, "lz_cpu.gelu"), row(0.25, "bfloat16", 100.0, "torch.gelu")]
    rows += [row(8.0, "float16", 49.0, "lz_cpu.gelu.avx2"), row(1.0, "float32", 50.0, "onednn.gelu")]
    said = cpu.summary(rows)
    assert said["rows"] == 4 and said["at_least_torch"] == 0.75 and said["native"] == 0.5
    assert said["geomean"] == pytest.approx(8.0**0.25) and said["geomean_small"] == pytest.approx(32.0**0.5)
    assert said["geomean_half"] == pytest.approx(2.0**0.5)
    assert cpu.summary([])["geomean"] is None
