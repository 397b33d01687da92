"""FlashInfer's attention: what is declared, put to the engine; what is called, on classes of the same signatures."""

from __future__ import annotations

import gc
import importlib
import inspect
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import described
import layerzero as lz
import pytest
import reference
import torch
from adapter_cases import TOLERANCES
from attention_calls import Dense, Paged, Varlen, attend, dense_calls, least, paged_calls, varlen_calls
from described import SM, adapter, fits, takes
from fake_flashinfer import FlashInfer, install
from torch import Tensor

BACKEND, PREFILLS, VERSION = "flashinfer", "flashinfer_prefill", "0.6.18"
SINGLE, RAGGED = "flashinfer.single_prefill", "flashinfer.ragged_prefill"
DECODE, CORES = "flashinfer.paged.decode.gqa", "flashinfer.paged.decode.gqa.tensor_cores"
PREFILL = "flashinfer.paged.prefill.gqa"
ONE = Dense(batch=1, seq_q=128, seq_k=128, head_dim=128, v_dim=128)
TWO = replace(ONE, batch=2)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered(BACKEND, VERSION), described.registered(PREFILLS, VERSION):
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """The library in place, and found."""
    return install(monkeypatch, FlashInfer())


def kernel(name: str) -> Any:
    """A kernel's function."""
    return kernels()[name]


def kernels() -> dict[str, Any]:
    """What is loaded, and what is not."""
    return {**adapter(BACKEND).KERNELS, **adapter(PREFILLS).KERNELS}


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        # From Turing on, which has no bfloat16 and little shared memory.
        (ONE, "t4", (), SINGLE, None),
        (replace(ONE, dtype="bfloat16"), "t4", (), SINGLE, "[CONSTRAINT_FAILED] dtype != bfloat16 or sm >= 80"),
        (replace(ONE, head_dim=256, v_dim=256), "t4", (), SINGLE, "[CONSTRAINT_FAILED] head_dim <= 128 or sm >= 80"),
        (replace(ONE, head_dim=256, v_dim=256), "b200", (), SINGLE, None),
        (ONE, "mi300x", (), SINGLE, "[PLATFORM_MISMATCH]"),
        (replace(ONE, dtype="float32"), "h100", (), SINGLE, "[DTYPE_UNSUPPORTED]"),
        # Head sizes it is compiled for.
        (replace(ONE, head_dim=80, v_dim=80), "h100", (), SINGLE, "[HEAD_DIM_INVALID]"),
        (replace(ONE, head_dim=192), "h100", (), SINGLE, None),
        (replace(ONE, head_dim=192, v_dim=192), "h100", (), SINGLE, "[CONSTRAINT_FAILED] head_dim != 192"),
        # No batch dimension.
        (TWO, "h100", (), SINGLE, "[CONSTRAINT_FAILED] batch"),
        (TWO, "h100", (), RAGGED, None),
        (ONE, "h100", (), RAGGED, "[CONSTRAINT_FAILED] batch"),
        (replace(ONE, heads=8, kv_heads=2), "h100", (), SINGLE, None),
        # Masks, windows, softcap, slopes, gradients.
        (replace(ONE, causal=False, mask="bool"), "h100", (), SINGLE, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(ONE, window_left=16, softcap=5.0), "h100", (), SINGLE, None),
        (replace(ONE, window_left=16, window_right=3), "h100", (), SINGLE, None),
        (
            replace(ONE, causal=False, window_left=16),
            "h100",
            (),
            SINGLE,
            "[CONSTRAINT_FAILED] causal or window_left < 0",
        ),
        (replace(ONE, seq_k=64, causal=False), "h100", (), SINGLE, None),
        (replace(ONE, alibi=True), "h100", (), SINGLE, "[INPUT_UNSUPPORTED]"),
        (ONE, "h100", ("--requires-grad",), SINGLE, "[AUTOGRAD_UNSUPPORTED]"),
        (replace(TWO, batch=20000, seq_q=1, seq_k=4096), "h100", (), RAGGED, "[CONSTRAINT_FAILED] batch * seq_q"),
        # Graphs: a plan is made on the host.
        (ONE, "h100", ("--capturing",), SINGLE, None),
        (TWO, "h100", ("--capturing",), RAGGED, "[CUDA_GRAPH_UNSAFE]"),
        (Paged(), "h100", (), DECODE, None),
        (Paged(), "h100", ("--capturing",), DECODE, "[CUDA_GRAPH_UNSAFE]"),
        (Paged(block_size=7, index_dtype="int64"), "h100", (), DECODE, None),
        (Paged(heads=10), "h100", (), DECODE, "[CONSTRAINT_FAILED] heads / max(kv_heads, 1) in [1, 2, 3, 4, 8]"),
        (Paged(heads=10), "h100", (), CORES, None),
        (Paged(head_dim=96), "h100", (), DECODE, "[HEAD_DIM_INVALID]"),
        (Paged(cache_dtype="float8_e4m3fn"), "h100", (), DECODE, None),
        (Paged(cache_dtype="bfloat16"), "h100", (), DECODE, "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype"),
        (Paged(cache_dtype="float32"), "h100", (), DECODE, "[KV_CACHE_DTYPE_MISMATCH]"),
        (Paged(prefill=True), "h100", (), PREFILL, None),
        (Paged(prefill=True, causal=False, window_left=3), "h100", (), PREFILL, "[CONSTRAINT_FAILED] causal or window"),
    ],
)
def test_what_is_declared(
    call: Dense | Paged, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None
) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_heads_first_is_laid_out_anew_for_sequences_one_after_another() -> None:
    shapes = replace(TWO, layout="BHSD").shapes
    printed = described.command(
        "explain", "--op", "attention", "--device", "h100", "--dtype", "fp16", "--layout", "BHSD",
        *(f"--shape={name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()),
    )  # fmt: skip
    assert "needs layout + contiguous" in next(l for l in printed.splitlines() if f" {RAGGED} " in l), printed


def test_calls_the_engine_lets_through_are_right(fake: FlashInfer) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    choices = {"head_dim": (64, 64, 128, 20), "window_right": (-1, -1, 2), "layout": ("BSHD", "BSHD", "BHSD")}
    for number, call in enumerate(dense_calls(9, 200, **choices)):
        call = replace(call, v_dim=call.head_dim if number % 5 else call.v_dim)
        device = ("t4", "h100", "b200")[number % 3]
        fake.sm = SM[device]
        for name in takes(call.ask(device, "--strict"), BACKEND):
            tensors = call.tensors()
            function = kernel(name)
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {SINGLE, RAGGED, f"{SINGLE}.cross", f"{RAGGED}.cross"} and min(ran.values()) >= least(2), ran


def test_paged_calls_the_engine_lets_through_are_right(fake: FlashInfer) -> None:
    torch.manual_seed(1)
    ran: dict[str, int] = {}
    choices: dict[str, Any] = {"head_dim": (64, 64, 128), "block_size": (1, 7, 16), "prefill": (False, True, True)}
    for call in paged_calls(5, 120, **choices, cache_dtype=(None, None, "float8_e4m3fn", "float8_e5m2")):
        for name in takes(call.ask("h100"), BACKEND):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = kernel(name)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            assert all(torch.equal(t.double(), before[key].double()) for key, t in tensors.items())
            ran[name] = ran.get(name, 0) + 1
    wanted = {name for name in kernels() if ".paged." in name and "mla" not in name and "cascade" not in name}
    assert set(ran) == wanted and min(ran.values()) >= least(4), ran


def test_nothing_is_copied_that_can_be_turned(fake: FlashInfer) -> None:
    for layout in ("BSHD", "BHSD"):
        call = Dense(batch=1, seq_k=40, kv_heads=2, layout=layout)
        tensors = call.tensors()
        function = kernel(SINGLE)
        output = function(**call.arguments(function, tensors))
        seen = fake.calls[-1]
        assert all(seen[t].data_ptr() == tensors[name].data_ptr() for t, name in zip("qkv", tensors, strict=True))
        assert seen["kv_layout"] == "NHD" and [seen[t].shape for t in "qkv"] == [(24, 4, 64), (40, 2, 64), (40, 2, 64)]
        assert output.shape == tensors["query"].shape


def test_what_cannot_be_described_to_the_copy_engine_is_copied(fake: FlashInfer) -> None:
    """A dimension of one whose stride is odd, and one that is repeated."""
    calls = {
        "one query": (Dense(batch=1, seq_q=1, kv_heads=4), "query", 1),
        "one key": (Dense(batch=1, seq_q=1, seq_k=1, kv_heads=4), "key", 1),
        "one head": (Dense(batch=1, heads=1, kv_heads=1, layout="BHSD"), "value", 1),
        "one head of many sequences": (Dense(batch=3, heads=1, kv_heads=1), "query", 2),
        "repeated heads": (Dense(batch=1, heads=4, kv_heads=4, layout="BHSD"), "key", 1),
    }
    for what, (call, name, axis) in calls.items():
        tensors = call.tensors()
        one = tensors[name]
        if what == "repeated heads":
            tensors[name] = one[:, :1].expand_as(one)
        else:
            strides = list(one.stride())
            strides[axis] = 3
            tensors[name] = one.as_strided(one.shape, strides)
        function = kernel(SINGLE if call.batch == 1 else RAGGED)
        call.check(function(**call.arguments(function, tensors)), call.contract(tensors))


# --- plans ------------------------------------------------------------------------------------------------------------


class Planning:
    """One kind of call, again and again."""

    def __init__(self, fake: FlashInfer, name: str, call: Paged) -> None:
        self.fake, self.function, self.call = fake, kernel(name), call
        self.tensors = call.tensors()

    def run(self, **change: Any) -> int:
        """Runs the call, holds it to the contract, and tells how many plans it took."""
        before = len(self.fake.plans)
        call = replace(self.call, **change)
        call.check(self.function(**call.arguments(self.function, self.tensors)), call.expected(self.tensors))
        return len(self.fake.plans) - before


def test_layers_of_a_model_share_a_plan(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert planning.run() == 1
    for _ in range(3):
        # Another layer: other queries and caches, the same tables and lengths.
        fresh = planning.call.tensors()
        planning.tensors |= {name: fresh[name] for name in ("query", "key_cache", "value_cache")}
        assert planning.run() == 0
    assert len(fake.made) == 1 and len(fake.runs) == 4


def test_a_write_to_what_was_planned_from_is_noticed(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    tensors = planning.tensors
    writes: list[Any] = [
        lambda: tensors["context_lens"].copy_(torch.tensor([41, 50])),
        lambda: tensors["context_lens"].add_(1),
        lambda: tensors["context_lens"].__setitem__(0, 7),
        lambda: tensors["context_lens"][1:].fill_(33),
        lambda: tensors["block_tables"][0].copy_(tensors["block_tables"][0].flip(0).clamp(max=3)),
        lambda: torch.add(tensors["context_lens"], 0, out=tensors["context_lens"]),
    ]
    for write in writes:
        write()
        lengths = tuple(tensors["context_lens"].tolist())
        assert planning.run(lengths=lengths) == 1, "the plan of other lengths was used"
        assert planning.run(lengths=lengths) == 0
    # Inference mode counts writes to tensors that were made outside it.
    with torch.inference_mode():
        tensors["context_lens"].copy_(torch.tensor([3, 9]))
        assert planning.run(lengths=(3, 9)) == 1
    # Another memory behind the same tensor.
    tensors["context_lens"].data = torch.tensor([12, 20], dtype=torch.int32)
    assert planning.run(lengths=(12, 20)) == 1


def test_tensors_made_in_inference_mode_are_read_every_time(fake: FlashInfer) -> None:
    with torch.inference_mode():
        planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
        assert [planning.run(), planning.run()] == [1, 1]
        planning.tensors["context_lens"].add_(-3)
        assert planning.run(lengths=(37, 47)) == 1
    assert len(fake.made) == 1


def test_another_tensor_is_another_plan_wherever_it_lies(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert planning.run() == 1
    for lengths in ((40, 50), (8, 16), (17, 50), (40, 50)):
        del planning.tensors["context_lens"]
        gc.collect()
        # Often where the one before it was, with the same version.
        planning.tensors["context_lens"] = torch.tensor(lengths, dtype=torch.int32)
        assert planning.run(lengths=lengths) == 1


def test_what_decides_a_plan_besides_tensors_is_part_of_it(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    changes: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"window_left": 7}, {"softcap": 3.0}, {"scale": 0.25}]
    assert [planning.run(**change) for change in changes] == [1] * 5
    assert [planning.run(**change) for change in changes] == [0] * 5
    assert len(fake.made) == 5 and len({id(w.workspace) for w in fake.made}) == 1, "one workspace"
    packed = Planning(fake, PREFILL, Paged(prefill=True, lengths=(40, 50), rows=(3, 4), block_size=16))
    assert [packed.run(), packed.run(), packed.run(causal=False), packed.run()] == [1, 0, 1, 0]
    packed.tensors["cu_seqlens_q"].copy_(torch.tensor([0, 6, 7]))
    assert packed.run(rows=(6, 1)) == 1


def test_streams_and_threads_have_plans_of_their_own(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    assert [planning.run(), planning.run()] == [1, 0]
    monkeypatch.setattr(plans, "stream_of", lambda device: 77)
    assert [planning.run(), planning.run()] == [1, 0]
    assert len({id(w.workspace) for w in fake.made}) == 2
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend((planning.run(), planning.run())))
    thread.start()
    thread.join()
    assert seen == [1, 0] and len(fake.made) == 3


def test_no_more_wrappers_are_kept_than_that(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    monkeypatch.setattr(plans, "MOST", 3)
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    scales = (0.1, 0.2, 0.3)
    assert [planning.run(scale=scale) for scale in scales] == [1, 1, 1]
    assert planning.run(scale=0.1) == 0
    assert planning.run(scale=0.4) == 1
    # The one that was used longest ago is gone.
    assert [planning.run(scale=0.1), planning.run(scale=0.3), planning.run(scale=0.2)] == [0, 0, 1]


def test_nothing_is_planned_while_a_graph_is_captured(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    monkeypatch.setattr(plans, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="which a CUDA graph cannot capture"):
        planning.run()
    assert len(fake.runs) == 1


def test_a_plan_that_failed_is_not_used(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    planning.run()
    good = planning.tensors["context_lens"].clone()
    planning.tensors["context_lens"].fill_(1000)
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match=r"context_lens\[0\] is 1000, expected 0 to 64"):
            planning.run()
    planning.tensors["context_lens"].copy_(good)
    assert planning.run() == 1
    planning.tensors["block_tables"][1, 2] = 99
    with pytest.raises(lz.InvalidCallError, match=r"block_tables\[1, 2\] is 99, expected an index from 0 to below"):
        planning.run()


def test_caches_that_differ_in_strides_are_refused(fake: FlashInfer) -> None:
    planning = Planning(fake, CORES, Paged(lengths=(40, 50), block_size=16))
    cache = planning.tensors["value_cache"]
    planning.tensors["value_cache"] = cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(RuntimeError, match="by the same strides"):
        planning.run()


# --- latent and sparse attention --------------------------------------------------------------------------------------


def held(got: Tensor, want: Any) -> None:
    """The result is what is wanted, to the tolerance of the dtype."""
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), torch.from_numpy(want.values), rtol=tolerance, atol=tolerance)


def latent(rows: int, tokens: tuple[int, ...], heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, and latent vectors in that shape."""
    return (
        torch.randn(rows, heads, 512).half(),
        torch.randn(rows, heads, 64).half(),
        torch.randn(*tokens, 512).half(),
        torch.randn(*tokens, 64).half(),
    )


@pytest.mark.parametrize("scale", [0.07, -0.05])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_latent_attention_over_pages(fake: FlashInfer, scale: float, index: torch.dtype) -> None:
    shapes = {"q_nope": (3, 2, 512), "q_pe": (3, 2, 64), "ckv_cache": (9, 4, 512), "kpe_cache": (9, 4, 64)}
    shapes |= {"block_tables": (3, 2), "context_lens": (3,)}
    answer = described.ask("attention.mla", "h100", shapes, "float16", scale=scale)
    assert not answer["flashinfer.mla.decode.paged"]
    q_nope, q_pe, ckv, kpe = latent(3, (9, 4))
    tables = torch.randperm(9)[:6].view(3, 2).to(index)
    for lengths in ((5, 0, 8), (0, 0, 0), (1, 2, 3)):
        context = torch.tensor(lengths, dtype=index)
        want = reference.mla_attention(
            *(t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)),
            scale,
            block_tables=tables.numpy(),
            context_lens=context.numpy(),
        )
        # Queries often come heads first out of a batched product.
        turned = q_nope.transpose(0, 1).contiguous().transpose(0, 1)
        for query in (q_nope, turned):
            held(kernel("flashinfer.mla.decode.paged")(query, q_pe, ckv, kpe, tables, context, scale), want)


@pytest.mark.parametrize("causal", [True, False])
def test_latent_attention_of_several_queries_over_pages(fake: FlashInfer, causal: bool) -> None:
    run = kernel("flashinfer.mla.prefill.paged")
    q_nope, q_pe, ckv, kpe = latent(8, (9, 4))
    tables = torch.randperm(9)[:6].view(3, 2).int()
    for lengths, ends in (((5, 0, 8), (1, 3, 4, 7)), ((0, 0, 0), (0, 2, 4, 8)), ((1, 2, 3), (0, 0, 4, 6))):
        context, bounds = torch.tensor(lengths, dtype=torch.int32), torch.tensor(ends)
        want = reference.mla_attention(
            *(t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)),
            0.07,
            causal=causal,
            qo_indptr=bounds.numpy(),
            block_tables=tables.numpy(),
            context_lens=context.numpy(),
        )
        held(run(q_nope, q_pe, ckv, kpe, tables, context, bounds, 0.07, causal), want)


def test_packed_sequences(fake: FlashInfer) -> None:
    torch.manual_seed(5)
    name = "flashinfer.ragged_prefill.varlen"
    ran = 0
    for call in varlen_calls(5, 90, head_dim=(64, 128), index_dtype=("int32",)):
        if name in takes(call.ask("h100"), name):
            tensors = call.tensors()
            call.check(kernel(name)(**call.arguments(kernel(name), tensors)), call.expected(tensors))
            ran += 1
    assert ran >= least(20)
    call = Varlen(rows=(2, 4), lengths=(5, 9))
    with pytest.raises(lz.InvalidCallError, match="max_seqlen_k is 8, expected at least 9"):
        kernel(name)(**{**call.arguments(kernel(name), call.tensors()), "max_seqlen_k": 8})


@pytest.mark.parametrize("causal", [True, False])
def test_latent_attention_over_vectors(fake: FlashInfer, causal: bool) -> None:
    draw = random.Random(3)
    run = kernel("flashinfer.mla.prefill")
    for number in range(12):
        shape = (9,) if number % 2 else (9, 1)
        q_nope, q_pe, ckv, kpe = latent(6, shape)
        arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
        held(
            run(q_nope, q_pe, ckv, kpe, None, None, 0.07, causal), reference.mla_attention(*arrays, 0.07, causal=causal)
        )
        rows, keys = sorted(draw.choices(range(7), k=4)), sorted(draw.choices(range(10), k=4))
        qo, kv = torch.tensor(rows, dtype=torch.int32), torch.tensor(keys, dtype=torch.int64)
        want = reference.mla_attention(*arrays, 0.07, causal=causal, qo_indptr=qo.numpy(), kv_indptr=kv.numpy())
        held(run(q_nope, q_pe, ckv, kpe, qo, kv, 0.07, causal), want)
    with pytest.raises(lz.InvalidCallError, match=r"kv_indptr\[1\] is 99"):
        run(q_nope, q_pe, ckv, kpe, torch.tensor([0, 6]), torch.tensor([0, 99]), 0.07, causal)


def test_latent_attention_is_for_the_sizes_it_is_compiled_for() -> None:
    def reasons(device: str, width: int, dtype: str = "float16", **dtypes: str) -> list[str]:
        shapes = {"q_nope": (4, 2, width), "q_pe": (4, 2, 64), "ckv": (9, width), "kpe": (9, 64)}
        return described.ask("attention.mla.prefill", device, shapes, dtype, dtypes=dtypes, scale=0.1)[
            "flashinfer.mla.prefill"
        ]

    assert not reasons("h100", 512) and not reasons("a100", 512, "bfloat16")
    assert reasons("t4", 512)[0].startswith("[SM_TOO_OLD]")
    assert any("dim_ckv" in line for line in reasons("h100", 256))
    narrow = reasons("h100", 512, "float16", ckv="float8_e4m3fn", kpe="float8_e4m3fn")
    assert narrow[0].startswith("[KV_CACHE_DTYPE_MISMATCH]")


def test_blocks_of_one_size(fake: FlashInfer) -> None:
    draw = random.Random(5)
    run = kernel("flashinfer.sparse.block")
    taken = 0
    for _ in range(30):
        row_blocks, columns, R, C = (
            draw.choice((1, 3)),
            draw.choice((2, 4)),
            draw.choice((1, 2, 4)),
            draw.choice((1, 3)),
        )
        kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2, 4))
        lists = [draw.choices(range(columns), k=draw.choice((0, 1, 3))) for _ in range(row_blocks)]
        indptr = torch.tensor([0, *map(len, lists)]).cumsum(0)
        indices = torch.tensor([j for one in lists for j in one], dtype=torch.int64)
        q = torch.randn(row_blocks * R, kv_heads * group, 64).half()
        k, v = (torch.randn(columns * C, kv_heads, 64).half() for _ in range(2))
        shapes = {"query": q.shape, "key": k.shape, "value": v.shape, "indptr": indptr.shape, "indices": indices.shape}
        reasons = described.ask("attention.sparse", "h100", shapes, "float16", block_rows=R, block_cols=C)
        assert bool(reasons["flashinfer.sparse.block"]) == (not len(indices) or R > 1 and R * group < 4)
        if reasons["flashinfer.sparse.block"]:
            continue
        taken += 1
        arrays = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in (q, k, v, indptr, indices)]
        held(run(q, k, v, indptr, indices, R, C, None), reference.sparse_block(*arrays, R, C))
    assert taken >= 10
    with pytest.raises(lz.InvalidCallError, match="indices"):
        run(q, k, v, indptr, torch.full_like(indices, columns), R, C, None)


@pytest.mark.parametrize("cover", [True, False])
def test_blocks_of_many_sizes(fake: FlashInfer, cover: bool) -> None:
    draw = random.Random(6)
    run = kernel("flashinfer.sparse.variable_block")
    for _ in range(12):
        kv_heads, group = draw.choice((1, 2)), draw.choice((1, 3))
        seq_q, seq_k = 9, 12
        rows = torch.tensor([[3, 0, 2, 4 if cover else 1]] * kv_heads, dtype=torch.int64)
        columns = torch.tensor([[5, 4, 3 if cover else 2]] * kv_heads)
        mask = torch.rand(kv_heads, 4, 3) > draw.choice((0.3, 0.7, 1.1))
        q = torch.randn(kv_heads * group, seq_q, 64).half()
        k, v = (torch.randn(kv_heads, seq_k, 64).half() for _ in range(2))
        wide = torch.zeros(kv_heads, seq_q, seq_k, dtype=torch.bool)
        for head in range(kv_heads):
            one = mask[head].repeat_interleave(rows[head], 0).repeat_interleave(columns[head], 1)
            wide[head, : one.shape[0], : one.shape[1]] = one
        want = attend(q, k, v, wide.repeat_interleave(group, 0), 0.125)
        got = run(q, k, v, mask, rows, columns, None)
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)
    with pytest.raises(lz.InvalidCallError, match=r"block_row_sizes\[0, 3\] is 99, expected 0 to 4"):
        run(q, k, v, mask, rows.clone().index_fill_(1, torch.tensor([3]), 99), columns, None)


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_engine_loads_the_document() -> None:
    for backend in (BACKEND, PREFILLS):
        assert {k.kernel_id for k in lz.list_kernels() if k.backend == backend} == set(adapter(backend).KERNELS)


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no CUDA toolkit; install one, or flashinfer-jit-cache"):
        install(monkeypatch, FlashInfer(compiler=False))
    compiled = tmp_path / "single_prefill"
    compiled.mkdir()
    (compiled / "single_prefill.so").touch()
    install(monkeypatch, FlashInfer(compiler=False, shipped=tmp_path))
    install(monkeypatch, FlashInfer(compiler=False, cached=tmp_path))
    del sys.modules["flashinfer"].__dict__["BlockSparseAttentionWrapper"]
    with pytest.raises(ImportError, match="flashinfer 0.6.18 has no BlockSparseAttentionWrapper; install 0.6 or newer"):
        adapter(BACKEND).detect()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="flashinfer cannot be imported"):
        adapter(BACKEND).detect()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU: list[Dense | Paged] = [
    Dense(batch=1, seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(batch=1, seq_q=64, seq_k=200, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16", layout="BHSD"),
    Dense(batch=1, seq_q=65, seq_k=90, head_dim=128, v_dim=128, dtype="bfloat16", scale=-0.3),
    Dense(batch=3, seq_q=70, seq_k=100, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(batch=3, seq_q=70, seq_k=100, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16", cross=True),
    Paged(lengths=(5, 700, 0, 256), heads=8, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16"),
    Paged(lengths=(33, 511), heads=10, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16", layout="HND"),
    Paged(
        prefill=True, lengths=(5, 700, 0, 256), rows=(8, 100, 2, 256), lead=1, tail=2, heads=8, head_dim=128,
        block_size=16, dtype="bfloat16",
    ),
]  # fmt: skip


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    with described.library_itself(BACKEND, PREFILLS) as version:
        yield version


@pytest.mark.gpu
def test_the_library_itself_is_right(found: str) -> None:
    torch.manual_seed(0)
    ran: set[str] = set()
    for call in ON_GPU:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        for name in kernels():
            ours = name.startswith(("flashinfer.single", "flashinfer.ragged", "flashinfer.paged"))
            same = (".cross" in name) is (isinstance(call, Dense) and call.cross)
            if ours and same and fits(name, keywords):
                want = call.contract(tensors).cpu() if isinstance(call, Dense) else call.expected(tensors)
                # Twice: planned, and by the plan that is kept.
                for _ in range(2):
                    call.check(lz.run_kernel(name, **keywords).cpu(), want)
                ran.add(name)
    assert {SINGLE, RAGGED, DECODE, CORES, PREFILL} <= ran


@pytest.mark.gpu
def test_latent_attention_of_the_library_itself(found: str) -> None:
    torch.manual_seed(0)
    q_nope, q_pe, ckv, kpe = (t.bfloat16() for t in latent(3, (40, 16), heads=16))
    tables = torch.randperm(40)[:36].view(3, 12).int()
    context = torch.tensor([5, 0, 190], dtype=torch.int32)
    arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
    want = reference.mla_attention(*arrays, 0.07, block_tables=tables.numpy(), context_lens=context.numpy())
    on_gpu = [t.cuda() for t in (q_nope, q_pe, ckv, kpe, tables, context)]
    held(kernel("flashinfer.mla.decode.paged")(*on_gpu, 0.07).cpu(), want)
    q_nope, q_pe, ckv, kpe = (t.bfloat16() for t in latent(6, (90, 1), heads=16))
    arrays = [t.double().numpy() for t in (q_nope, q_pe, ckv, kpe)]
    qo, kv = torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([0, 60, 90], dtype=torch.int32)
    want = reference.mla_attention(*arrays, 0.07, qo_indptr=qo.numpy(), kv_indptr=kv.numpy())
    on_gpu = [t.cuda() for t in (q_nope, q_pe, ckv, kpe, qo, kv)]
    held(kernel("flashinfer.mla.prefill")(*on_gpu, 0.07, True).cpu(), want)


@pytest.mark.gpu
def test_blocks_of_the_library_itself(found: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(64, 8, 128).bfloat16()
    k, v = (torch.randn(160, 2, 128).bfloat16() for _ in range(2))
    indptr, indices = torch.tensor([0, 3, 3, 4, 6]).int(), torch.tensor([0, 4, 4, 9, 1, 2]).int()
    arrays = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in (q, k, v, indptr, indices)]
    on_gpu = [t.cuda() for t in (q, k, v, indptr, indices)]
    held(kernel("flashinfer.sparse.block")(*on_gpu, 16, 16, None).cpu(), reference.sparse_block(*arrays, 16, 16))


@pytest.mark.gpu
def test_signatures_are_those_of_the_library(found: str) -> None:
    library, fake = importlib.import_module("flashinfer"), FlashInfer().modules()["flashinfer"]
    assert {"q", "k", "v", "causal", "kv_layout", "sm_scale", "window_left", "logits_soft_cap"} <= set(
        inspect.signature(library.single_prefill_with_kv_cache).parameters
    )
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        ours = inspect.signature(getattr(fake, name).plan).parameters
        theirs = inspect.signature(getattr(library, name).plan).parameters
        assert list(ours)[:9] == list(theirs)[:9]
