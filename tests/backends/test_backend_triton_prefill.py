"""Packed queries over pages in Triton: what is declared, and what is computed, in the interpreter and on a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adapter_cases as cases
import described
import pytest
import torch
from attention_calls import FULL
from interpreting import interpret
from processes import SUPPORT, forked
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

KERNELS = ("triton.paged.prefill", "triton.paged.prefill.gqa")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if a device were here."""
    with described.registered("triton", "3.6.0"):
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

CACHE = (640, 16, 8, 128)
CALL = {
    "query": (300, 32, 128),
    "key_cache": CACHE,
    "value_cache": CACHE,
    "block_tables": (4, 128),
    "context_lens": (4,),
    "cu_seqlens_q": (5,),
}
INDICES = dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "int32")


@pytest.mark.parametrize(
    ("device", "dtype", "flags", "more", "reason"),
    [
        ("h200", "bfloat16", (), {}, None),
        ("h200", "bfloat16", ("--capturing", "--deterministic"), {}, None),
        ("a100", "float16", (), {"window_left": 100, "softcap": 30.0, "scale": 0.1}, None),
        ("h200", "float16", (), {"causal": False}, None),
        ("h200", "float16", (), {"causal": False, "window_right": 3}, "[PARAM_UNSUPPORTED]"),
        ("h200", "float32", (), {}, "[DTYPE_UNSUPPORTED]"),
        ("t4", "float16", (), {}, "[SM_TOO_OLD]"),
    ],
)
def test_what_is_declared(
    device: str, dtype: str, flags: tuple[str, ...], more: dict[str, Any], reason: str | None
) -> None:
    given = {"causal": True, **more}
    found = described.ask("attention.gqa.prefill.paged", device, CALL, dtype, *flags, dtypes=INDICES, **given)
    reasons = found["triton.paged.prefill.gqa"]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_how_the_work_is_cut() -> None:
    """Short chunks have blocks of 64 rows; every block has a row for each head that shares keys, and fits into shared memory."""
    blocks_for = import_module("layerzero.backends.triton.prefilling").blocks_for
    assert blocks_for(4, 128, 16, 227 << 10).rows == 64 and blocks_for(4, 128, 17, 227 << 10).rows == 128
    for group in (1, 3, 8, 64):
        for width in (32, 128, 256):
            for shared in (64 << 10, 99 << 10, 227 << 10):
                cut = blocks_for(group, width, 100, shared)
                assert cut.rows >= group
                assert cut.rows * width * 2 + cut.stages * cut.keys * 4 * width <= shared


# --- what is computed -------------------------------------------------------------------------------------------------


def kernels() -> dict[str, cases.Kernel]:
    """The kernels, also for the narrow float32 of the cases, which only devices do not have."""
    cases.load_backends()
    found: dict[str, Callable[..., Any]] = import_module(f"{cases.PACKAGE}.backends.triton.prefilling").KERNELS
    wider = {"dtypes": ["float32"], "supports_kv_cache_dtypes": ["float32"], "dims": {}, "conditions": []}
    return {
        rules["kernel_id"]: cases.Kernel({**rules, **wider}, (op,), found[rules["kernel_id"]])
        for op, listed in cases.document("triton")["ops"].items()
        for rules in listed
        if rules["kernel_id"] in found
    }


def wrong_cases() -> list[str]:
    """What the interpreter finds wrong on the cases of the operations."""
    wrong, found = [], kernels()
    for name, kernel in found.items():
        ran = 0
        for case in cases.cases(kernel.ops[0]):
            # What is in the data is not looked at: it gives NaN, not an error.
            if case.name.startswith("error_") or cases.reason_to_skip(kernel, case):
                continue
            got = kernel.run(**dict(cases.arguments(kernel, case, case.inputs())))
            problem = cases.difference(got, next(iter((case.expect or {}).values())))
            wrong += [] if problem is None else [f"{name}: {case.name}: {problem}"]
            ran += 1
        wrong += [] if ran >= 15 else [f"{name}: only {ran} ran"]
    return wrong if set(found) == set(KERNELS) else [f"there are {sorted(found)}"]


class Draw:
    """A call at random, with what it must give."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        self.one = self.random.choice
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float16 if device == "cpu" else self.one((torch.float16, torch.bfloat16))

    def floats(self, *shape: int) -> Tensor:
        """Numbers between -1.5 and 1.5; rows may have gaps between them."""
        gap = self.one((0, 0, 8))
        wide = torch.rand(*shape[:-1], shape[-1] + gap, generator=self.generator) * 3.0 - 1.5
        return wide.to(self.dtype).to(self.device)[..., : shape[-1]]

    def call(self) -> tuple[dict[str, Any], Tensor]:
        """Sequences of several lengths, some with a common prefix; rows before, between and after them belong to none."""
        batch, kv_heads, group = self.one((1, 2, 3, 5)), self.one((1, 2)), self.one((1, 2, 3, 4, 8))
        head_dim, slots, layout = (
            self.one((8, 40, 64, 128)),
            self.one((1, 3, 16, 16, 64, 128)),
            self.one(("NHD", "HND")),
        )
        news = [self.one((0, 1, 2, 17, 40, 70)) for _ in range(batch)]
        prefix = self.one((0, 0, 33, 150))
        # A sequence may have fewer tokens than queries: the first of them see nothing.
        lengths = [max(prefix + new + self.one((0, 0, 5, -3)), 0) for new in news]
        most = max(1, *(-(-n // slots) for n in lengths)) + self.one((0, 2))
        total = most * batch + 2
        table = torch.randperm(total, generator=self.generator)[: most * batch].view(batch, most)
        table[:, : prefix // slots] = table[:1, : prefix // slots].clone()
        for i, length in enumerate(lengths):
            table[i, -(-length // slots) :] = 1 << 20
        index, first, after = self.one((torch.int32, torch.int64)), self.one((0, 0, 3)), self.one((0, 0, 70))
        starts = torch.tensor([first, *(first + sum(news[: i + 1]) for i in range(batch))])
        shape = (slots, kv_heads) if layout == "NHD" else (kv_heads, slots)
        k, v = (self.floats(total, *shape, head_dim) for _ in range(2))
        q = self.floats(int(starts[-1]) + after, kv_heads * group, head_dim)
        window, causal = self.one((-1, -1, 0, 9, 70, 1000)), self.one((True, True, False))
        call: dict[str, Any] = {"query": q, "key_cache": k, "value_cache": v}
        call |= {"block_tables": table, "context_lens": torch.tensor(lengths), "cu_seqlens_q": starts}
        call |= {name: call[name].to(index).to(self.device) for name in INDICES}
        call |= {"causal": causal, "scale": self.one((None, 0.3, -0.2)), "layout": layout}
        call |= {"window_left": window if causal else -1, "softcap": self.one((0.0, 0.0, 2.0, 300.0))}
        return call, expected(call)


def expected(call: dict[str, Any]) -> Tensor:
    """What a call must give, in float64 over gathered keys."""
    q, k, v = (call[name].double() for name in ("query", "key_cache", "value_cache"))
    if call["layout"] == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    output = torch.zeros_like(q)
    starts, lengths = call["cu_seqlens_q"].tolist(), call["context_lens"].tolist()
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        pages = call["block_tables"][b, : -(-length // k.shape[1])].long()
        key, value = (x[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], key) * (call["scale"] or q.shape[2] ** -0.5)
        if call["softcap"]:
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        new = scores.shape[1]
        place = torch.arange(new, device=q.device)[:, None] + length - new
        at = torch.arange(length, device=q.device)[None]
        seen = torch.ones(new, length, dtype=torch.bool, device=q.device)
        if call["causal"]:
            seen &= at <= place
        if call["window_left"] >= 0:
            seen &= at >= place - call["window_left"]
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value)
    return output


def wrong_draws(device: str, count: int) -> list[str]:
    """What is wrong with calls at random."""
    run, wrong = kernels()["triton.paged.prefill.gqa"].run, []
    for seed in range(count):
        draw = Draw(seed, device)
        call, want = draw.call()
        got = run(**call).double()
        worst = float((got - want).abs().nan_to_num(math.inf).max())
        shown = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in call.items()}
        tolerance = 4e-3 if draw.dtype == torch.float16 else 3e-2
        wrong += [] if worst <= tolerance else [f"{seed}: off by {worst:.3g}: {draw.dtype} {shown}"]
    return wrong


def wrong_data(device: str) -> list[str]:
    """Pages and lengths that cannot be give NaN, for the sequences that have them; bounds that cannot be break nothing."""
    q, cache = torch.randn(9, 4, 16, device=device).half(), torch.randn(6, 4, 2, 16, device=device).half()
    run, wrong = kernels()["triton.paged.prefill.gqa"].run, []
    starts = torch.tensor([0, 3, 6, 9], device=device)
    for page, length in ((6, 7), (-1, 7), (1 << 30, 7), (2, 9), (2, -1)):
        tables = torch.tensor([[0, 1], [3, page], [4, 5]], device=device)
        lens = torch.tensor([8, length, 3], device=device)
        lost = run(q, cache, cache, tables, lens, starts, True, None, -1, 0.0, "NHD").isnan().flatten(1)
        if not bool(lost[3:6].all()) or bool(lost[:3].any()) or bool(lost[6:].any()):
            wrong.append(f"page {page}, length {length}: {lost.any(1).tolist()}")
    lens = torch.tensor([8, 7, 3], device=device)
    for bounds in ([0, 3, 6, 90], [5, 3, 1, 0], [-4, 2, 5, 9], [0, 20, 40, 60]):
        given = torch.tensor(bounds, device=device)
        if run(q, cache, cache, tables.clamp(0, 5), lens, given, True, None, -1, 0.0, "NHD").shape != q.shape:
            wrong.append(f"bounds {bounds}")
    return wrong


def wrong_behind_the_window(device: str) -> list[str]:
    """Pages a window does not reach may have been given away, and may hold anything."""
    draw = Draw(1, device)
    call: dict[str, Any] = {"query": draw.floats(4, 2, 8)}
    call |= {name: draw.floats(8, 16, 1, 8) for name in ("key_cache", "value_cache")}
    call |= {"block_tables": torch.arange(1, 8)[None], "context_lens": torch.tensor([100])}
    call |= {"cu_seqlens_q": torch.tensor([0, 4])}
    call |= {name: call[name].int().to(device) for name in INDICES}
    call |= {"causal": True, "scale": None, "layout": "NHD", "window_left": 9, "softcap": 0.0}
    want, wrong = expected(call), []
    for entry in (0, -1):
        # 100 tokens, the first query at 96, nine before it: pages before the sixth are out of reach.
        given = {**call, "block_tables": call["block_tables"].clone()}
        given["block_tables"][:, :5] = entry
        for name in ("key_cache", "value_cache"):
            given[name] = call[name].clone()
            given[name][0] = math.nan
        worst = float((kernels()["triton.paged.prefill.gqa"].run(**given).double() - want).abs().nan_to_num(9.0).max())
        wrong += [] if worst < 3e-2 else [f"entry {entry} behind the window: off by {worst:.3g}"]
    return wrong


def wrong_many(device: str) -> list[str]:
    """More sequences than a block of threads looks at together."""
    draw = Draw(0, device)
    batch, new = 300, [0, 1, 2, 0, 3] * 60
    starts = torch.tensor([0, *new]).cumsum(0)
    lens = torch.tensor(new) + torch.arange(batch) % 3
    call: dict[str, Any] = {"query": draw.floats(int(starts[-1]), 2, 8)}
    call |= {name: draw.floats(batch, 16, 1, 8) for name in ("key_cache", "value_cache")}
    call |= {"block_tables": torch.arange(batch)[:, None], "context_lens": lens, "cu_seqlens_q": starts}
    call |= {name: call[name].int().to(device) for name in INDICES}
    call |= {"causal": True, "scale": None, "layout": "NHD", "window_left": -1, "softcap": 0.0}
    got = kernels()["triton.paged.prefill.gqa"].run(**call).double()
    worst = float((got - expected(call)).abs().nan_to_num(math.inf).max())
    return [] if worst < 3e-2 else [f"many sequences: off by {worst:.3g}"]


def wrong_copies(device: str) -> list[str]:
    """Rows that do not begin on multiples of 16 bytes are copied."""
    call, want = Draw(3, device).call()
    for name in ("query", "key_cache", "value_cache"):
        whole = call[name]
        room = whole.new_zeros((*whole.shape[:-1], whole.shape[-1] + 3))
        call[name] = room[..., 1 : 1 + whole.shape[-1]].copy_(whole)
    got = kernels()["triton.paged.prefill.gqa"].run(**call).double()
    return [] if float((got - want).abs().nan_to_num(math.inf).max()) < 3e-2 else ["copies are wrong"]


def interpreted() -> list[str]:
    """What the interpreter finds wrong."""
    interpret()
    torch.manual_seed(0)
    return (
        wrong_cases()
        + wrong_data("cpu")
        + wrong_copies("cpu")
        + wrong_behind_the_window("cpu")
        + wrong_many("cpu")
        + wrong_draws("cpu", 40 if FULL else 8)
    )


def test_the_interpreter_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import warnings\nwarnings.simplefilter('ignore')\nimport test_backend_triton_prefill as t\nanswer(t.interpreted())"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> str:
    """A device, if there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
def test_on_a_device(device: str) -> None:
    assert wrong_data(device) + wrong_behind_the_window(device) + wrong_copies(device) == []
    assert wrong_many(device) + wrong_draws(device, 120) == []


@pytest.mark.gpu
def test_calls_can_be_captured_and_go_straight(device: str) -> None:
    """Twice the same bits, replayed too."""
    run = kernels()["triton.paged.prefill.gqa"].run
    for seed in range(20):
        call, _ = Draw(seed, device).call()
        first = run(**call)
        function, tensors = run.direct(**call)  # type: ignore[attr-defined]
        assert all(torch.equal(function(*tensors), first) for _ in range(3)), seed
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = function(*tensors)
        for _ in range(3):
            captured.fill_(7.0)
            graph.replay()
            assert torch.equal(captured, first), seed
