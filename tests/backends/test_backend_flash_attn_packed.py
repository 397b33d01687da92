"""FlashAttention on packed sequences, with log-sum-exp and with sinks: what is called, on functions of the same signatures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import reference
import torch
from attention_calls import Dense, Varlen, least, varlen_calls
from flash_attn_installed import PREFIX, all_registered, backends, install, kernel, ran_right


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All three, as if they were installed."""
    with all_registered():
        yield


@backends
def test_packed_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    torch.manual_seed(1)
    ran = ran_right(fake, backend, varlen_calls(3, 120))
    assert set(ran) == {f"{PREFIX[backend]}.varlen"} and min(ran.values()) >= least(20), ran


@backends
def test_logarithms_and_sinks_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    torch.manual_seed(4)
    cases: list[tuple[Any, str]] = [
        (Dense(seq_q=5, seq_k=9, causal=causal, window_left=left, softcap=cap, layout=layout), "")
        for causal, left, cap, layout in ((True, -1, 0.0, "BSHD"), (False, -1, 4.0, "BHSD"), (True, 3, 0.0, "BHSD"))
    ]
    cases += [(Varlen(causal=causal, lead=(1, 0), tail=(2, 1), scale=-0.2), ".varlen") for causal in (True, False)]
    for call, kind in cases:
        function, tensors = kernel(backend, f"{PREFIX[backend]}.lse{kind}"), call.tensors()
        output, lse = function(**call.arguments(function, tensors))
        want = call.expected(tensors)
        call.check(output, want)
        assert lse.dtype == torch.float32 and lse.shape == output.shape[:-1]
        if kind:
            starts, firsts = tensors["cu_seqlens_q"].tolist(), tensors["cu_seqlens_k"].tolist()
            assert all(bool((lse[row] == -torch.inf).all()) for row in (0, len(lse) - 1))
            rows = range(starts[0], starts[1])
            scores = [by_hand(call, tensors, row, rows, range(firsts[0], firsts[1])) for row in rows]
            torch.testing.assert_close(lse[starts[0] : starts[1]], torch.stack(scores), rtol=1e-3, atol=1e-3)
        else:
            function = kernel(backend, f"{PREFIX[backend]}.sinks")
            sinks = torch.randn(call.heads)
            got = function(**call.arguments(function, {**tensors, "sinks": sinks}))
            arrays = (tensors[name].double().numpy() for name in ("query", "key", "value"))
            options = {"causal": call.causal, "softcap": call.softcap, "layout": call.layout}
            window = (call.window_left, call.window_right)
            joined = reference.attention(*arrays, window=window, sinks=sinks.double().numpy(), **options)
            call.check(got, torch.from_numpy(joined.values.copy()))


def by_hand(call: Varlen, tensors: dict[str, torch.Tensor], row: int, rows: range, keys: range) -> torch.Tensor:
    """The logarithms of a row: of every head, over the keys its position reaches."""
    query, key = tensors["query"][row].double(), tensors["key"][list(keys)].double()
    scores = torch.einsum("hd,khd->hk", query, key.repeat_interleave(call.heads // call.kv_heads, 1)) * call.scale
    reached = len(keys) if not call.causal else len(keys) - (rows.stop - row) + 1
    return scores[:, :reached].logsumexp(-1).float()


@backends
def test_packed_calls_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    function, call = kernel(backend, f"{PREFIX[backend]}.varlen"), Varlen(rows=(2, 4), lengths=(5, 9))
    tensors = call.tensors()
    function(**call.arguments(function, tensors))
    assert (fake.calls[-1]["max_seqlen_q"], fake.calls[-1]["max_seqlen_k"]) == (4, 9)
    wrong = {**call.arguments(function, tensors), "max_seqlen_k": 8}
    with pytest.raises(lz.InvalidCallError, match="max_seqlen_k is 8, expected at least 9"):
        function(**wrong)
