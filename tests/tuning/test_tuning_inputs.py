"""Inputs of calls that are measured: large ones repeat what was drawn."""

from __future__ import annotations

import json

import torch
from layerzero.tuning import gate, inputs


def made(rows: int, hidden: int, dtype: str = "float32") -> torch.Tensor:
    call = {"op": "norm.rms", "tensors": {"input": {"dtype": dtype, "shape": [rows, hidden]}}, "params": {"eps": 1e-6}}
    tensor = inputs.make(json.dumps(call)).kwargs["input"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_no_row_of_a_large_tensor_is_as_another() -> None:
    tensor = made(1024, 4096)
    assert tensor.numel() > 3 * inputs._DRAWN
    assert len({tuple(row) for row in tensor[:, :4].tolist()}) == 1024
    assert abs(float(tensor.mean())) < 0.01 and abs(float(tensor.std()) - 1.0) < 0.01


def test_the_same_call_gives_the_same_numbers_and_a_small_one_is_drawn_as_a_whole() -> None:
    assert torch.equal(made(1024, 4096, "bfloat16"), made(1024, 4096, "bfloat16"))
    drawn = torch.randn((4, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(made(4, 8), drawn)


def test_what_is_right_of_large_integers_is_known() -> None:
    """Scales are float32 whatever the result is, so that no call in float64 says what is right; and a result in half precision is
    allowed what half precision is allowed, although the call is about integers."""
    tensors = {"values": {"dtype": "int8", "shape": [6000, 6000]}, "scales": {"dtype": "float32", "shape": [6000, 1]}}
    params = {"dtype": "bfloat16", "granularity": "per_channel"}
    call = inputs.make(json.dumps({"op": "dequantize", "tensors": tensors, "params": params}))
    assert call.tolerance == 1e-2 and call.flops > gate.REFERENCE_FLOPS
    judged = gate.Gate(call)
    assert judged.judge("torch.dequantize")[1] is None
    wrong = call.kwargs["values"].to(torch.bfloat16) * (call.kwargs["scales"] * 1.1).to(torch.bfloat16)
    assert judged.judge_results((wrong,))[1] is not None
