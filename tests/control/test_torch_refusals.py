"""Why torch would not use one of its own attention kernels, in torch's words."""

from __future__ import annotations

import os
import warnings
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import torch_refusals
from torch import Tensor


class Judges:
    """Stands for `torch.backends.cuda`: refuses some implementations, and warns as torch does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reasons: dict[str, list[bytes | str]]) -> None:
        self.asked: list[tuple[Any, ...]] = []

        def judge(name: str) -> Any:
            def can_use(params: Any, debug: bool) -> bool:
                for reason in reasons.get(name, ()) if debug else ():
                    if isinstance(reason, bytes):
                        os.write(2, reason)
                    else:
                        warnings.warn(reason, UserWarning, stacklevel=1)
                return name not in reasons

            return can_use

        def params(*given: Any) -> tuple[Any, ...]:
            self.asked.append(given)
            return given

        monkeypatch.setattr(torch.backends.cuda, "SDPAParams", params)
        for name in torch_refusals.JUDGES.values():
            monkeypatch.setattr(torch.backends.cuda, name, judge(name))


def operands(heads: int = 4, kv_heads: int = 4, queries: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, queries, 8), torch.randn(2, kv_heads, 9, 8), torch.randn(2, kv_heads, 9, 8)


def test_warnings_of_both_kinds_are_read(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    line = b"[W1118 08:20:03.608 sdp_utils.cpp:473] Warning: Flash needs half precision. (function check_dtypes)\n"
    python = "cuDNN is too old. (Triggered internally at /pytorch/sdp_utils.cpp:85.)"
    reasons = {"can_use_flash_attention": [line, b"not torch's\n", line], "can_use_cudnn_attention": [python]}
    Judges(monkeypatch, reasons)
    assert torch_refusals.refusals(*operands()) == {
        "FLASH_ATTENTION": ["Flash needs half precision."],
        "CUDNN_ATTENTION": ["cuDNN is too old."],
    }
    # What others write meanwhile is not lost.
    assert capfd.readouterr().err == "not torch's\n"


def test_a_refusal_without_a_reason_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Judges(monkeypatch, {"can_use_efficient_attention": []})
    assert torch_refusals.refusals(*operands()) == {"EFFICIENT_ATTENTION": ["it gives no reason"]}


def test_torch_is_asked_about_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    judges = Judges(monkeypatch, {})
    query, key, value = operands(heads=8)
    mask = torch.ones(5, 9, dtype=torch.bool)
    torch_refusals.refusals(query, key, value, attn_mask=mask, dropout_p=0.5, causal=False)
    torch_refusals.refusals(*operands(queries=1))
    torch_refusals.refusals(*operands())
    assert judges.asked[0][:3] == (query, key, value)
    assert judges.asked[0][3] is mask
    assert [given[4:] for given in judges.asked] == [(0.5, False, True), (0.0, False, False), (0.0, True, False)]


def test_torchs_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU torch's functions refuse every tensor, and say so.
    judges = dict(list(torch_refusals.JUDGES.items())[:2])
    monkeypatch.setattr(torch_refusals, "JUDGES", judges)
    found = torch_refusals.refusals(*operands())
    assert found.keys() == judges.keys()
    assert all("cuda" in reason.lower() for reasons in found.values() for reason in reasons)


def test_explanations_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = operands()
    plain = lz.explain("attention", query, key, value, layout="BHSD")
    assert plain.torch_refusals == {}
    asked: list[Any] = []

    def of_call(args: Any, kwargs: Any) -> dict[str, list[str]]:
        asked.append((args, kwargs))
        return {"FLASH_ATTENTION": ["one", "two"]}

    monkeypatch.setattr(torch_refusals, "of_call", of_call)
    report = lz.explain("attention", query, key, value, layout="BHSD")
    assert report.torch_refusals == report.to_dict()["torch_refusals"] == {"FLASH_ATTENTION": ["one", "two"]}
    assert "torch's function would not use\n  FLASH_ATTENTION: one; two" in str(report)
    assert asked == [((query, key, value), {"layout": "BHSD"})]
    lz.explain("rms_norm", query)
    assert len(asked) == 1


def test_elsewhere_torch_has_no_say() -> None:
    query, key, value = operands()
    assert torch_refusals.of_call((query, key, value), {"layout": "BHSD"}) == {}
    assert torch_refusals.of_call((lz.TensorSpec((2, 4, 5, 8), "float32"),) * 3, {}) == {}
