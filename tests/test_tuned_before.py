"""What one process measured, the next one goes by: from its first call on, on every device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import answer

CALL = '{"op": "rms_norm", "tensors": {"input": {"dtype": "bfloat16", "shape": [64, 512]}}}'


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_goes_by_what_another_one_measured(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    code = f"""
        import json, torch
        import layerzero as lz
        lz.configure(perfdb={{"path": {str(tmp_path / "perfdb.sqlite")!r}}})
        x = torch.randn(64, 512, dtype=torch.bfloat16, device={device!r})
    """
    tuned = answer(
        code
        + f"""
        report = lz.tune(calls=[json.loads({CALL!r})], device={device!r}, budget=2, progress=False).to_dict()
        answer([report["tuned"][0]["chosen"], lz.explain("rms_norm", x).basis])
    """
    )
    kernel, basis = tuned
    assert basis == "measured"
    asked = answer(
        code
        + """
        first = lz.explain("rms_norm", x)
        lz.rms_norm(x)
        answer([first.chosen, first.basis, lz.which("rms_norm", x)["kernel_id"]])
    """
    )
    assert asked == [kernel, "measured", kernel]
