"""FlashInfer's cascade: pages that all sequences share are read once, and no result depends on it."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Paged
from described import adapter, takes
from fake_flashinfer import FlashInfer, install
from hypothesis import given
from hypothesis import strategies as st
from layerzero import backend_files
from layerzero.compat import probe
from layerzero.compat.calls import candidates
from layerzero.tuning import inputs

BACKEND, PREFILLS, VERSION = "flashinfer", "flashinfer_prefill", "0.6.18"
DECODE, PREFILL = "flashinfer.paged.cascade.decode.gqa", "flashinfer.paged.cascade.prefill.gqa"
FA2 = {"flashinfer.paged.cascade.decode.fa2", f"{DECODE}.fa2"}
NAMES = {"flashinfer.paged.cascade.decode", DECODE, "flashinfer.paged.cascade.prefill", PREFILL, *FA2}
#: 32 tokens shared, in two pages.
TWO = Paged(lengths=(40, 33, 70), rows=(3, 1, 7), block_size=16, shared_prefix=32)
MANY = replace(TWO, prefill=True)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered(BACKEND, VERSION), described.registered(PREFILLS, VERSION):
        yield


@pytest.fixture(scope="module")
def library() -> Iterator[FlashInfer]:
    """The library in place, and found."""
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, FlashInfer())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """The library in place, and found, with no plan made yet."""
    return install(monkeypatch, FlashInfer())


def kernel(call: Paged, fa2: bool = False) -> Any:
    """The function that serves a call."""
    found = {**adapter(BACKEND).KERNELS, **adapter(PREFILLS).KERNELS}
    kind = "" if call.heads == call.kv_heads else ".gqa"
    own = ".fa2" if fa2 and not call.prefill else ""
    return found[f"flashinfer.paged.cascade.{'prefill' if call.prefill else 'decode'}{kind}{own}"]


def run(call: Paged, tensors: dict[str, torch.Tensor], fa2: bool = False) -> torch.Tensor:
    """What the kernel gives."""
    function = kernel(call, fa2)
    got: torch.Tensor = function(**call.arguments(function, tensors))
    return got


def levels(fake: FlashInfer) -> list[int]:
    """The pages of each level, as planned last."""
    planned = [one.planned for one in fake.made if one.planned is not None]
    return list(planned[-1]["levels"])


# --- what is right ----------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> Paged:
    """Calls whose sequences share what they promise to, and have next to nothing or much of their own."""
    size = draw(st.sampled_from((1, 4, 16)))
    shared = draw(st.integers(0, 3)) * size + draw(st.sampled_from((0, 0, 1, size - 1)))
    batch = draw(st.integers(1, 4))
    own = st.sampled_from((0, 1, size - 1, size, size + 1, 20))
    kv_heads = draw(st.sampled_from((1, 2)))
    return Paged(
        prefill=draw(st.booleans()),
        lengths=tuple(shared + draw(own) for _ in range(batch)),
        rows=tuple(draw(st.sampled_from((0, 1, 1, 2, size, 9))) for _ in range(batch)),
        lead=draw(st.sampled_from((0, 0, 2))),
        tail=draw(st.sampled_from((0, 1, 3))),
        heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        kv_heads=kv_heads,
        block_size=size,
        dtype=draw(st.sampled_from(("float16", "bfloat16"))),
        index_dtype=draw(st.sampled_from(("int32", "int64"))),
        layout=draw(st.sampled_from(("NHD", "HND"))),
        four=draw(st.booleans()),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.3, -0.2, 0.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 4.0))),
        shared_prefix=shared,
    )


@given(call=calls(), seed=st.integers(0, 1 << 16))
def test_no_result_depends_on_the_promise(library: FlashInfer, call: Paged, seed: int) -> None:
    if call.prefill and call.lead + sum(call.rows) + call.tail == 0:
        call = replace(call, tail=1)
    torch.manual_seed(seed)
    tensors = call.tensors()
    before = {name: t.clone() for name, t in tensors.items()}
    # The expected values are those of each sequence for itself: what is shared is nothing to them.
    want = call.expected(tensors)
    for fa2 in (False, True):
        call.check(run(call, tensors, fa2), want)
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
def test_caches_of_eight_bits(fake: FlashInfer, cache: str) -> None:
    for call in (replace(TWO, cache_dtype=cache), replace(MANY, cache_dtype=cache)):
        tensors = call.tensors()
        call.check(run(call, tensors), call.expected(tensors))
        assert levels(fake)[0] == 2


@pytest.mark.parametrize(
    ("call", "pages"),
    [
        # Shared pages, then the pages of all sequences behind them.
        (TWO, [2, 5]),
        (replace(TWO, shared_prefix=31), [1, 8]),
        (replace(TWO, shared_prefix=47, lengths=(48, 47, 70)), [2, 5]),
        # A sequence that ends where the shared part does keeps a page for itself.
        (replace(TWO, lengths=(40, 32, 70)), [1, 7]),
        (replace(TWO, lengths=(16, 16, 70), shared_prefix=16), [7]),
        # Causal queries stand behind what is shared; others need not.
        (replace(MANY, rows=(8, 1, 7)), [2, 5]),
        (replace(MANY, rows=(9, 1, 7)), [1, 8]),
        (replace(MANY, rows=(9, 1, 7), causal=False), [2, 5]),
        (replace(MANY, rows=(25, 1, 7)), [11]),
        (replace(MANY, rows=(50, 0, 7)), [11]),
        (replace(MANY, rows=(0, 0, 7)), [2, 5]),
        # Nothing is shared.
        (replace(TWO, shared_prefix=0), [11]),
        (replace(TWO, shared_prefix=15), [11]),
    ],
)
def test_as_many_pages_are_shared_as_can_be(fake: FlashInfer, call: Paged, pages: list[int]) -> None:
    tensors = call.tensors()
    call.check(run(call, tensors), call.expected(tensors))
    assert levels(fake) == pages
    assert fake.plans == fake.runs == ["MultiLevelCascadeAttentionWrapper"]


@pytest.mark.parametrize("lengths", [(40, 33, 70), (16, 40, 70)])
def test_levels_of_our_own_run_what_is_not_for_hopper(fake: FlashInfer, lengths: tuple[int, ...]) -> None:
    call = replace(TWO, lengths=lengths, shared_prefix=min(32, *lengths))
    tensors = call.tensors()
    for _ in range(2):
        call.check(run(call, tensors, fa2=True), call.expected(tensors))
    levels = 2 if 33 in lengths else 1
    assert [(type(one).__name__, one.backend) for one in fake.made] == [
        ("BatchPrefillWithPagedKVCacheWrapper", "fa2")
    ] * levels
    assert len(fake.plans) == levels and len(fake.runs) == 2 * levels
    # The library's class is another kind, with a plan of its own.
    call.check(run(call, tensors), call.expected(tensors))
    assert len(fake.plans) == levels + 1


def test_rows_without_keys_take_no_plan(fake: FlashInfer) -> None:
    call = replace(MANY, rows=(0, 0, 0), tail=3)
    tensors = call.tensors()
    assert not run(call, tensors).any() and not fake.plans


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [TWO, MANY])
def test_layers_share_a_plan_and_writes_are_noticed(fake: FlashInfer, call: Paged) -> None:
    tensors = call.tensors()

    def plans(call: Paged = call) -> int:
        before = len(fake.plans)
        call.check(run(call, tensors), call.expected(tensors))
        return len(fake.plans) - before

    assert plans() == 1
    fresh = call.tensors()
    tensors |= {name: fresh[name] for name in ("query", "key_cache", "value_cache")}
    assert plans() == 0
    # Another page for all of them, more tokens, tables of another tensor.
    tensors["block_tables"][:, 1] = int(tensors["block_tables"][2, 4])
    assert plans() == 1
    tensors["context_lens"].add_(1)
    assert plans(replace(call, lengths=(41, 34, 71))) == 1
    tensors["block_tables"] = tensors["block_tables"].clone()
    assert plans() == 1 and plans() == 0
    # Told another promise, the same wrapper is planned again.
    made = len(fake.made)
    assert plans(replace(call, shared_prefix=16)) == 1 and levels(fake)[0] == 1
    assert plans() == 1 and len(fake.made) == made
    # Other kinds have plans of their own.
    assert plans(replace(call, scale=0.3)) == 1
    assert plans(replace(call, softcap=3.0)) == 1
    assert plans() == 0
    if call.prefill:
        assert plans(replace(call, causal=False)) == 1
        tensors["cu_seqlens_q"][1] -= 1
        assert plans(replace(call, rows=(2, 2, 7))) == 1


def test_one_wrapper_serves_plans_with_and_without_shared_pages(fake: FlashInfer) -> None:
    tensors = TWO.tensors()
    for lengths, pages in (((40, 33, 70), [2, 5]), ((32, 32, 70), [1, 6]), ((40, 33, 70), [2, 5])):
        tensors["context_lens"].copy_(torch.tensor(lengths))
        run(TWO, tensors)
        assert levels(fake) == pages
    made = len(fake.made)
    short = replace(TWO, lengths=(16, 40, 70), shared_prefix=16)
    other = short.tensors()
    run(short, other)
    other["context_lens"][0] = 17
    run(replace(short, lengths=(17, 40, 70)), {**other, "block_tables": other["block_tables"].clamp(max=5)})
    # One of two levels and one of one, whatever is promised.
    assert made == 1 and len(fake.made) == 2


def test_nothing_is_planned_while_a_graph_is_captured(fake: FlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = importlib.import_module("layerzero.backends._shared.flashinfer.plans")
    monkeypatch.setattr(plans, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="which a CUDA graph cannot capture"):
        run(TWO, TWO.tensors())


# --- promises that are broken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [TWO, MANY])
def test_a_broken_promise_is_an_error(fake: FlashInfer, call: Paged) -> None:
    tensors = call.tensors()
    run(call, tensors)
    pages = tensors["block_tables"][:, :2].clone()
    own = int(tensors["block_tables"][2, 3])
    tensors["block_tables"][2, 1] = own
    expected = rf"block_tables\[2, 1\] is {own}, expected {int(pages[0, 1])} as in sequence 0: shared_prefix=32"
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match=expected) as raised:
            run(call, tensors)
        assert raised.value.code == "BAD_DATA" and "shared_prefix=0" in str(raised.value.hint)
    tensors["block_tables"][:, :2] = pages
    tensors["context_lens"][1] = 31
    with pytest.raises(lz.InvalidCallError, match=r"context_lens\[1\] is 31, expected 32 or more, as shared_prefix"):
        run(call, tensors)
    # What no kernel could serve is said as everywhere.
    tensors["context_lens"][1] = 1000
    with pytest.raises(lz.InvalidCallError, match=r"context_lens\[1\] is 1000, expected 0 to 80"):
        run(call, tensors)
    tensors["context_lens"][1] = 33
    call.check(run(call, tensors), call.expected(tensors))
    tensors["block_tables"][:, 0] = 99
    with pytest.raises(lz.InvalidCallError, match=r"block_tables\[0, 0\] is 99, expected an index from 0 to below"):
        run(call, tensors)


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [replace(TWO, head_dim=128), replace(MANY, head_dim=128)])
def test_what_is_declared(call: Paged) -> None:
    name = PREFILL if call.prefill else DECODE

    def reasons(device: str, *flags: str, **change: Any) -> list[str]:
        return replace(call, **change).ask(device, *flags)[name]

    for device in ("t4", "a100", "l40s", "h100", "h200", "b200"):
        assert not reasons(device)
        if not call.prefill:
            assert bool(call.ask(device)[f"{DECODE}.fa2"]) is (device not in ("h100", "h200"))
        assert reasons(device, dtype="bfloat16") == reasons(device, dtype="bfloat16", shared_prefix=16)
        assert bool(reasons(device, dtype="bfloat16")) is (device == "t4")
    assert not reasons("h100", layout="HND", index_dtype="int64", softcap=3.0, scale=-0.2)
    assert not reasons("h100", cache_dtype="float8_e4m3fn")
    assert not reasons("h100", heads=64)
    refused: list[tuple[list[str], str]] = [
        (reasons("mi300x"), "[PLATFORM_MISMATCH]"),
        (reasons("h100", shared_prefix=0), "[CONSTRAINT_FAILED] shared_prefix"),
        (reasons("h100", shared_prefix=15), "[CONSTRAINT_FAILED] shared_prefix >= block_size"),
        (reasons("h100", window_left=8), "[PARAM_UNSUPPORTED] window is"),
        (reasons("h100", head_dim=96), "[HEAD_DIM_INVALID]"),
        (reasons("t4", head_dim=256), "[CONSTRAINT_FAILED] head_dim <= 128 or sm >= 80"),
        (reasons("h100", heads=66), "[CONSTRAINT_FAILED] heads * head_dim <= 8192"),
        (reasons("h100", cache_dtype="bfloat16"), "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype"),
        (reasons("h100", dtype="float32"), "[DTYPE_UNSUPPORTED]"),
        (reasons("h100", "--capturing"), "[CUDA_GRAPH_UNSAFE]"),
        (reasons("h100", "--requires-grad"), "[AUTOGRAD_UNSUPPORTED]"),
    ]
    for lines, wanted in refused:
        assert any(line.startswith(wanted) for line in lines), (wanted, lines)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("prefill", [False, True])
def test_other_kernels_take_the_call_with_the_promise_and_without(prefill: bool, heads: int) -> None:
    for device in ("t4", "h100", "b200"):
        call = replace(TWO, prefill=prefill, heads=heads, head_dim=128)
        promised, plain = call.ask(device), replace(call, shared_prefix=0).ask(device)
        ours = {name for name in promised if name in NAMES}
        own = [name for name in ours if device == "h100" or name not in FA2]
        assert len(ours) == 2 - prefill and takes(promised, "flashinfer.paged.cascade") == sorted(own)
        assert not takes(plain, "flashinfer.paged.cascade")
        assert {k: v for k, v in promised.items() if k not in ours} == {k: v for k, v in plain.items() if k not in ours}


def test_explain_shows_it_behind_those_it_has_to_beat() -> None:
    shapes = replace(TWO, head_dim=128).shapes
    arguments = [f"--shape={name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()]
    printed = described.command(
        "explain", "--op", "attention.paged", "--device", "h100", "--dtype", "fp16", *arguments,
        "--input-dtype", "block_tables=int32", "--input-dtype", "context_lens=int32", "--param", "shared_prefix=32",
    )  # fmt: skip
    lines = printed.splitlines()
    places = {
        name: next(i for i, line in enumerate(lines) if f" {name} " in line)
        for name in (DECODE, "flashinfer.paged.decode.gqa")
    }
    assert places["flashinfer.paged.decode.gqa"] < places[DECODE], printed


def test_the_documents_have_the_kernels() -> None:
    known = {k.kernel_id: k.backend for k in lz.list_kernels() if k.kernel_id in NAMES}
    assert set(known) == NAMES and all((b == PREFILLS) is (".prefill" in name) for name, b in known.items())


def test_compat_has_a_call_for_each_of_them() -> None:
    """And no kernel gets another than before for it: the first that a kernel takes is tried."""
    for backend in (BACKEND, PREFILLS):
        document = json.loads((backend_files.folder(backend) / "capabilities.json").read_text())
        for op, kernels in document["ops"].items():
            for one in kernels:
                tried = list(itertools.islice(candidates(one, op), probe.TRIES)) if "paged" in op else []
                promised = [call.get("params", {}).get("shared_prefix") for call in tried]
                assert not any(promised[:1])
                assert one["kernel_id"] not in NAMES or 32 in promised


# --- inputs that are made ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [TWO, MANY, replace(TWO, shared_prefix=80), replace(MANY, shared_prefix=77)])
@pytest.mark.parametrize("seed", [0, 1])
def test_inputs_for_tuning_keep_the_promise(fake: FlashInfer, call: Paged, seed: int) -> None:
    """And leave queries behind what is shared, where the pages are enough for both."""
    indices = ("block_tables", "context_lens", "cu_seqlens_q")
    tensors = {
        name: {"dtype": call.index_dtype if name in indices else call.dtype, "shape": list(shape)}
        for name, shape in call.shapes.items()
    }
    params = {"shared_prefix": call.shared_prefix}
    made = inputs.make(
        json.dumps({"op": "attention.paged", "tensors": tensors, "params": params, "layout": "NHD"}), seed=seed
    )
    assert made.op == call.op and made.kwargs["shared_prefix"] == call.shared_prefix
    tables, lengths = made.kwargs["block_tables"], made.kwargs["context_lens"]
    columns = call.shared_prefix // call.block_size
    assert torch.equal(tables[:, :columns], tables[:1, :columns].expand(3, columns))
    assert columns == 5 or not torch.equal(tables[0], tables[1])
    queries = -(-sum(call.rows) // 3) if call.prefill else 1
    assert int(lengths.min()) >= min(80, call.shared_prefix + queries - 1) and int(lengths.max()) <= 80
    function = kernel(call)
    given = {"scale": None, "softcap": 0.0, "causal": True, "layout": "NHD", **made.kwargs}
    got = function(**{name: given[name] for name in inspect.signature(function).parameters})
    assert torch.isfinite(got).all() and levels(fake)[0] in (columns, columns - 1)


def test_inputs_without_the_promise_are_what_they_were() -> None:
    call = {
        "op": "attention.paged",
        "tensors": {n: {"dtype": "float16", "shape": list(s)} for n, s in replace(TWO, shared_prefix=0).shapes.items()},
    }
    for name in ("block_tables", "context_lens"):
        call["tensors"][name]["dtype"] = "int32"
    one, other = (inputs.make(json.dumps(call | {"params": p})) for p in ({}, {"shared_prefix": 0}))
    assert all(torch.equal(one.kwargs[n], other.kwargs[n]) for n in ("block_tables", "context_lens"))
    assert int(one.kwargs["context_lens"].min()) < 80


# --- on a GPU ---------------------------------------------------------------------------------------------------------

#: One kind of kernel: bfloat16, heads of 128.
ON_GPU = [
    replace(TWO, lengths=(700, 513, 600, 512 + 64), shared_prefix=512, heads=8, head_dim=128, dtype="bfloat16"),
    replace(TWO, lengths=(300, 513), shared_prefix=300, heads=8, head_dim=128, dtype="bfloat16", layout="HND"),
    replace(TWO, lengths=(16, 200), shared_prefix=16, heads=8, head_dim=128, dtype="bfloat16", scale=-0.1),
    replace(TWO, lengths=(700, 520), shared_prefix=512, heads=2, head_dim=128, dtype="bfloat16", four=True),
    replace(
        MANY, lengths=(700, 560, 600), rows=(100, 1, 70), lead=1, tail=2, shared_prefix=512, heads=8, head_dim=128,
        dtype="bfloat16",
    ),
    replace(MANY, lengths=(700, 560), rows=(300, 40), shared_prefix=512, heads=8, head_dim=128, dtype="bfloat16"),
    replace(MANY, lengths=(40, 20), rows=(50, 20), shared_prefix=16, heads=2, head_dim=128, dtype="bfloat16"),
    replace(
        MANY, lengths=(700, 560), rows=(300, 40), shared_prefix=512, heads=8, head_dim=128, dtype="bfloat16",
        causal=False, layout="HND",
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
        want, keywords = call.expected(tensors), call.keywords(tensors)
        for name in NAMES:
            if described.fits(name, keywords):
                # Twice: planned, and by the plan that is kept.
                for _ in range(2):
                    call.check(lz.run_kernel(name, **keywords), want)
                ran.add(name)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ran == (NAMES if hopper else NAMES - FA2)


@pytest.mark.gpu
def test_a_broken_promise_to_the_library_itself(found: str) -> None:
    call = ON_GPU[0]
    tensors = call.tensors("cuda")
    tensors["block_tables"][1, 3] = 0
    with pytest.raises(lz.InvalidCallError, match=r"block_tables\[1, 3\] is 0, expected"):
        lz.run_kernel(DECODE, **call.keywords(tensors))


@pytest.mark.gpu
def test_signatures_are_those_of_the_library(found: str) -> None:
    library, fake = importlib.import_module("flashinfer"), FlashInfer().modules()["flashinfer"]
    for method in ("__init__", "plan", "run"):
        ours, theirs = (
            list(inspect.signature(getattr(m.MultiLevelCascadeAttentionWrapper, method)).parameters)
            for m in (fake, library)
        )
        assert ours == theirs[: len(ours)]
