"""One query per sequence in Triton: evenly lying keys, pages, latent vectors; in the interpreter and on a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adapter_cases as cases
import described
import layerzero as lz
import pytest
import torch
from attention_calls import FULL
from interpreting import interpret
from processes import SUPPORT, forked
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

MODULES = ("decode", "masked", "paged", "mla")
KERNELS = (
    "triton.decode",
    "triton.decode.gqa",
    "triton.decode.masked",
    "triton.decode.masked.gqa",
    "triton.paged.decode",
    "triton.paged.decode.gqa",
    "triton.mla.decode.paged",
)
Drawn = tuple[Callable[..., Tensor], dict[str, Any], Tensor]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if a device were here."""
    with described.registered("triton", "3.6.0"):
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

KEYS = (4, 8, 512, 128)
DENSE = ("attention.gqa.decode", {"query": (4, 32, 1, 128), "key": KEYS, "value": KEYS})
LATENT = (
    "attention.mla.decode.paged",
    {
        "q_nope": (4, 128, 512),
        "q_pe": (4, 128, 64),
        "ckv_cache": (32, 64, 512),
        "kpe_cache": (32, 64, 64),
        "block_tables": (4, 8),
        "context_lens": (4,),
    },
)
INDICES = {"block_tables": "int32", "context_lens": "int32"}


@pytest.mark.parametrize(
    ("device", "dtype", "flags", "more", "reason"),
    [
        ("h200", "bfloat16", (), {}, None),
        ("h200", "bfloat16", ("--capturing", "--deterministic"), {}, None),
        ("a100", "float32", (), {"window_left": 100, "softcap": 30.0, "scale": 0.1}, None),
        ("h200", "float16", (), {"causal": False, "window_right": 3}, None),
        ("h200", "float64", (), {}, "[DTYPE_UNSUPPORTED]"),
        ("t4", "float16", (), {}, "[SM_TOO_OLD]"),
        ("h200", "float16", ("--requires-grad",), {}, "[AUTOGRAD_UNSUPPORTED]"),
        ("h200", "float16", (), {"dropout_p": 0.1}, "[PARAM_UNSUPPORTED]"),
    ],
)
def test_what_is_declared(
    device: str, dtype: str, flags: tuple[str, ...], more: dict[str, Any], reason: str | None
) -> None:
    for layout, order in (("BHSD", (0, 1, 2, 3)), ("BSHD", (0, 2, 1, 3))):
        shapes = {name: tuple(shape[i] for i in order) for name, shape in DENSE[1].items()}
        reasons = described.ask(DENSE[0], device, shapes, dtype, *flags, layout=layout, **more)["triton.decode.gqa"]
        assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("dtype", "cache", "reason"),
    [
        ("bfloat16", "bfloat16", None),
        ("bfloat16", "float16", "[CONSTRAINT_FAILED] ckv_cache.dtype == q_nope.dtype"),
        ("float32", "float32", "[DTYPE_UNSUPPORTED]"),
    ],
)
def test_what_is_declared_of_latent_vectors(dtype: str, cache: str, reason: str | None) -> None:
    dtypes = {**INDICES, "ckv_cache": cache, "kpe_cache": cache}
    found = described.ask(LATENT[0], "h200", LATENT[1], dtype, "--capturing", dtypes=dtypes, scale=0.1)
    reasons = found["triton.mla.decode.paged"]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ((4, 1, 1, 512), None),
        ((1, 32, 1, 512), None),
        ((1, 512), None),
        (None, "[CONSTRAINT_FAILED] attn_mask.present"),
    ],
)
def test_what_is_declared_of_masks(mask: tuple[int, ...] | None, reason: str | None) -> None:
    shapes, given = dict(DENSE[1]), {"attn_mask": "bool"} if mask else {}
    if mask:
        shapes["attn_mask"] = mask
    found = described.ask(
        DENSE[0], "h200", shapes, "bfloat16", "--capturing", dtypes=given, layout="BHSD", causal=False
    )
    reasons = found["triton.decode.masked.gqa"]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons
    assert bool(found["triton.decode.gqa"]) == (mask is not None)


def test_how_many_parts() -> None:
    """Short contexts and many sequences stay whole; a long context alone is spread over the device."""
    splitting = import_module("layerzero.backends.triton.decoding.splitting")
    device = torch.device("cpu")
    many = splitting.processors(device)
    assert splitting.parts_for(8, 0, device) == splitting.parts_for(8, 1, device) == 1
    assert splitting.parts_for(100 * many, 64, device) == 1
    assert splitting.parts_for(1, 512, device) >= many
    assert splitting.parts_for(1, 512, device, weight=1000.0) == 1


@pytest.mark.parametrize(("group", "together"), [(1, 8), (2, 8), (3, 4), (4, 4), (8, 2), (16, 1), (17, 1)])
def test_how_many_sequences_are_worked_on_together(group: int, together: int) -> None:
    """As many as fill 16 rows; where prefixes are expected, in large batches, and where contexts can be long."""
    found = import_module("layerzero.backends.triton.decoding.together").together_for
    device = torch.device("cpu")
    many = import_module("layerzero.backends.triton.launching").processors(device)
    assert found(2 * many, 1, group, 128, 2048, device) == 1
    lz.configure(shared_prefixes=True)
    try:
        assert found(2 * many, 1, group, 128, 2048, device) == together
        assert found(many, 1, group, 128, 2048, device) == 1
        assert found(2 * many, 1, group, 256, 2048, device) == 1
        assert found(2 * many, 1, group, 128, 256, device) == 1
    finally:
        lz.configure(shared_prefixes=None)


# --- what is computed -------------------------------------------------------------------------------------------------


def kernels() -> dict[str, cases.Kernel]:
    """The kernels, without conditions that are about devices."""
    cases.load_backends()
    found: dict[str, Callable[..., Any]] = {}
    for module in MODULES:
        found |= import_module(f"{cases.PACKAGE}.backends.triton.decoding.{module}").KERNELS
    needs_mask = "attn_mask.present"
    return {
        rules["kernel_id"]: cases.Kernel(
            {**rules, "conditions": [needs_mask] if needs_mask in rules["conditions"] else []},
            (op,),
            found[rules["kernel_id"]],
        )
        for op, listed in cases.document("triton")["ops"].items()
        for rules in listed
        if rules["kernel_id"] in found
    }


def wrong_cases(device: str) -> list[str]:
    """What is wrong on the cases of the operations."""
    wrong, found = [], kernels()
    for name, kernel in found.items():
        ran = 0
        for case in cases.cases(kernel.ops[0]):
            used = set(case.dtypes.values()) - {"int32", "int64", "bool"}
            # What is in the data is not looked at: it gives NaN, not an error.
            if cases.reason_to_skip(kernel, case) or case.name.startswith("error_"):
                continue
            mixed = len(used) > 1 and not any(dtype.startswith("float8") for dtype in used)
            # The interpreter multiplies matrices of bfloat16 as if they were integers.
            if mixed or (device == "cpu" and "bfloat16" in used):
                continue
            inputs = {key: tensor.to(device) for key, tensor in case.inputs().items()}
            got = kernel.run(**dict(cases.arguments(kernel, case, inputs)))
            problem = cases.difference(got.cpu(), next(iter((case.expect or {}).values())))
            wrong += [] if problem is None else [f"{name}: {case.name}: {problem}"]
            ran += 1
        wrong += [] if ran else [f"{name}: nothing ran"]
    return wrong if set(found) == set(KERNELS) else [f"there are {sorted(found)}"]


class Draw:
    """Calls at random, with what they must give."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        self.one = self.random.choice
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.one((torch.float32, torch.float16) + ((torch.bfloat16,) if device != "cpu" else ()))

    def floats(self, *shape: int) -> Tensor:
        """Numbers between -1.5 and 1.5; rows may have gaps between them."""
        gap = self.one((0, 0, 8))
        wide = torch.rand(*shape[:-1], shape[-1] + gap, generator=self.generator) * 3.0 - 1.5
        return wide.to(self.dtype).to(self.device)[..., : shape[-1]]

    def extras(self) -> dict[str, Any]:
        """Scales, windows and caps."""
        return {
            "scale": self.one((None, 0.3, -0.2)),
            "window_left": self.one((-1, -1, 0, 9, 70, 1000)),
            "softcap": self.one((0.0, 0.0, 2.0, 30.0, 1e20)),
        }

    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        kv_heads = self.one((1, 2))
        return kv_heads * self.one((1, 1, 3, 4, 16, 17, 40)), kv_heads

    def pages(self) -> tuple[list[int], Tensor, Tensor, int, int]:
        """Lengths, page tables and lengths as tensors, pages in all and slots to a page."""
        lengths = [self.one((0, 1, 15, 16, 33, 200, 300)) for _ in range(self.one((1, 2, 3)))]
        slots = self.one((1, 3, 16, 16, 64, 128))
        most = max(1, *(-(-n // slots) for n in lengths)) + self.one((0, 0, 3))
        total = most * len(lengths) + 2
        table = torch.randperm(total, generator=self.generator)[: most * len(lengths)].view(len(lengths), most)
        for i, length in enumerate(lengths):
            table[i, -(-length // slots) :] = 1 << 20
        index = self.one((torch.int32, torch.int64))
        tables, lens = table.to(index).to(self.device), torch.tensor(lengths, dtype=index, device=self.device)
        return lengths, tables, lens, total, slots

    def dense(self, masked: bool = False) -> Drawn:
        """Keys that lie evenly, and a mask if asked for."""
        batch, (heads, kv_heads), layout = self.one((1, 2)), self.heads(), self.one(("BSHD", "BHSD"))
        head_dim, v_dim, seq_k = self.one((8, 20, 64, 128)), self.one((16, 64)), self.one((1, 5, 64, 65, 200, 300))
        sizes = ((1, heads, head_dim), (seq_k, kv_heads, head_dim), (seq_k, kv_heads, v_dim))
        q, k, v = (
            self.floats(batch, n, h, d) if layout == "BSHD" else self.floats(batch, h, n, d) for n, h, d in sizes
        )
        call = {"query": q, "key": k, "value": v, **self.extras(), "layout": layout}
        query, key, value = (x if layout == "BSHD" else x.transpose(1, 2) for x in (q, k, v))
        more = (call["scale"] or head_dim**-0.5, call["window_left"], call["softcap"])
        allowed = None
        if masked:
            call["attn_mask"] = self.mask(batch, heads, seq_k)
            allowed = call["attn_mask"].broadcast_to(batch, heads, 1, seq_k)[:, :, 0]
        want = torch.stack(
            [
                attended(query[b, 0], key[b], value[b], *more, None if allowed is None else allowed[b])
                for b in range(batch)
            ]
        )
        kernel = "triton.decode.masked.gqa" if masked else "triton.decode.gqa"
        return kernels()[kernel].run, call, want.view(*q.shape[:-1], v_dim)

    def masked(self) -> Drawn:
        """Keys that lie evenly, some of which a mask hides."""
        return self.dense(masked=True)

    def mask(self, batch: int, heads: int, seq_k: int) -> Tensor:
        """What a cache of fixed size has (padding, tokens, room) or any booleans; for all heads or sequences, or for each."""
        shape = (self.one((1, batch)), self.one((1, 1, heads)), 1, seq_k)
        if self.one((True, False)):
            return (torch.rand(shape, generator=self.generator) < self.one((0.05, 0.5, 0.95))).to(self.device)
        first, last = (torch.randint(0, seq_k + 1, (*shape[:3], 1), generator=self.generator) for _ in range(2))
        at = torch.arange(seq_k)
        return ((at >= first) & (at < last)).to(self.device)

    def paged(self) -> Drawn:
        """Keys in pages."""
        (heads, kv_heads), head_dim, layout = self.heads(), self.one((8, 20, 64)), self.one(("NHD", "HND"))
        lengths, tables, lens, total, slots = self.pages()
        shape = (slots, kv_heads) if layout == "NHD" else (kv_heads, slots)
        k, v = (self.floats(total, *shape, head_dim) for _ in range(2))
        q = self.floats(len(lengths), *self.one(((), (1,))), heads, head_dim)
        call = {"query": q, "key_cache": k, "value_cache": v, "block_tables": tables, "context_lens": lens}
        call |= {**self.extras(), "layout": layout}
        k, v = (x if layout == "NHD" else x.transpose(1, 2) for x in (k, v))
        more = (call["scale"] or head_dim**-0.5, call["window_left"], call["softcap"])
        rows = q.view(len(lengths), heads, head_dim)
        want = [attended(rows[b], *(read(x, tables[b], n) for x in (k, v)), *more) for b, n in enumerate(lengths)]
        if (window := call["window_left"]) >= 0:
            for b, length in enumerate(lengths):
                # Pages behind the window may have been given away.
                tables[b, : max(length - 1 - window, 0) // slots] = self.one((-1, 1 << 20))
        return kernels()["triton.paged.decode.gqa"].run, call, torch.stack(want).view(q.shape)

    def shared(self) -> Drawn:
        """Keys in pages, of sequences that begin with the same ones, some of them for longer than others."""
        self.dtype = self.dtype if self.dtype != torch.float32 else torch.float16
        batch, kv_heads, group = self.one((5, 8, 9, 11)), self.one((2, 3)), self.one((1, 2, 3, 4, 7, 8))
        head_dim, slots, index = self.one((8, 64)), self.one((3, 16, 16, 64, 128)), self.one((torch.int32, torch.int64))
        common = self.one((0, 70, 330)) // slots
        # Sequences may end before the common pages do, or in the middle of them.
        rests = [self.one((1, 1, 40, 130, 200, -60)) for _ in range(batch)]
        lengths = [max(common * slots + rest, 0) for rest in rests]
        most = max(1, *(-(-n // slots) for n in lengths)) + self.one((0, 3))
        total = most * batch + 2
        table = torch.randperm(total, generator=self.generator)[: most * batch].view(batch, most)
        table[:, :common] = table[:1, :common].clone()
        if common > 1 and self.one((True, False)):
            # One of them is different in the middle.
            table[self.one(range(batch)), common // 2] = total - 1
        for i, length in enumerate(lengths):
            table[i, -(-length // slots) :] = 1 << 20
        tables, lens = table.to(index).to(self.device), torch.tensor(lengths, dtype=index, device=self.device)
        k, v = (self.floats(total, slots, kv_heads, head_dim) for _ in range(2))
        q = self.floats(batch, kv_heads * group, head_dim)
        call = {"query": q, "key_cache": k, "value_cache": v, "block_tables": tables, "context_lens": lens}
        call |= {**self.extras(), "window_left": -1, "layout": "NHD"}
        more = (call["scale"] or head_dim**-0.5, -1, call["softcap"])
        want = [attended(q[b], *(read(x, tables[b], n) for x in (k, v)), *more) for b, n in enumerate(lengths)]
        return kernels()["triton.paged.decode.gqa"].run, call, torch.stack(want)

    def latent(self) -> Drawn:
        """Latent vectors in pages."""
        self.dtype = self.dtype if self.dtype != torch.float32 else torch.float16
        heads, (dim_ckv, dim_kpe) = self.one((1, 4, 16, 20, 70)), self.one(((64, 16), (24, 8), (128, 64)))
        lengths, tables, lens, total, slots = self.pages()
        n, p = self.floats(len(lengths), heads, dim_ckv), self.floats(len(lengths), heads, dim_kpe)
        ckv, kpe = self.floats(total, slots, dim_ckv), self.floats(total, slots, dim_kpe)
        call = {"q_nope": n, "q_pe": p, "ckv_cache": ckv, "kpe_cache": kpe, "block_tables": tables}
        call |= {"context_lens": lens, "scale": self.one((0.05, 0.1))}
        want = []
        for b, length in enumerate(lengths):
            latent, turned = (read(x[:, :, None], tables[b], length) for x in (ckv, kpe))
            key, query = torch.cat((latent, turned), -1), torch.cat((n[b], p[b]), -1)
            want.append(attended(query, key, latent, call["scale"], -1, 0.0))
        return kernels()["triton.mla.decode.paged"].run, call, torch.stack(want)


def read(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first tokens of a sequence, in order."""
    slots = cache.shape[1]
    pages = table[: -(-length // slots)].long()
    return cache[pages].flatten(0, 1)[:length]


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, allowed: Tensor | None = None
) -> Tensor:
    """What one query gives, in float64: heads, then their numbers; keys and values have tokens first, `allowed` heads."""
    first = max(key.shape[0] - 1 - window, 0) if window >= 0 else 0
    group = query.shape[0] // key.shape[1]
    q, k, v = query.double(), *(x[first:].double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("hd,nhd->hn", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, first:], -math.inf)
        # What may attend to nothing gives zeros.
        return torch.einsum("hn,nhd->hd", torch.softmax(scores, -1).nan_to_num(0.0), v)
    return torch.einsum("hn,nhd->hd", torch.softmax(scores, -1), v)


def wrong_draws(device: str, count: int) -> list[str]:
    """What is wrong with calls at random, with as many parts as they would have and with some of their own."""
    cases.load_backends()
    splitting = import_module(f"{cases.PACKAGE}.backends.triton.decoding.splitting")
    usual, wrong = splitting.parts_for, []
    for seed in range(count):
        draw = Draw(seed, device)
        run, call, want = (draw.dense, draw.paged, draw.latent, draw.masked)[seed % 4]()
        for parts in (0, 1, draw.one((2, 3, 5, 40))):
            splitting.parts_for = (lambda *_, parts=parts: parts) if parts else usual
            got = run(**call).double()
            tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[draw.dtype]
            worst = float((got - want.to(got.device)).abs().nan_to_num(math.inf).max())
            shown = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in call.items()}
            wrong += [] if worst <= tolerance else [f"{seed}: {parts} parts: off by {worst:.3g}: {draw.dtype} {shown}"]
    splitting.parts_for = usual
    return wrong


@contextmanager
def any_batch() -> Iterator[list[int]]:
    """Has small batches be worked on several sequences at a time, too; how many at a time they were."""
    together = import_module(f"{cases.PACKAGE}.backends.triton.decoding.together")
    used: list[int] = []
    usual, limits = together.together_for, (together._SHORTEST, together._CROWD)

    def noted(*given: Any) -> int:
        used.append(usual(*given))
        return used[-1]

    together.together_for, together._SHORTEST, together._CROWD = noted, 0, 0
    lz.configure(shared_prefixes=True)
    try:
        yield used
    finally:
        lz.configure(shared_prefixes=None)
        together.together_for, (together._SHORTEST, together._CROWD) = usual, limits


def wrong_together(device: str, count: int) -> list[str]:
    """What is wrong with sequences that begin alike, whole and in parts."""
    cases.load_backends()
    splitting = import_module(f"{cases.PACKAGE}.backends.triton.decoding.splitting")
    usual, wrong = splitting.parts_for, []
    with any_batch() as used:
        for seed in range(count):
            draw = Draw(seed, device)
            run, call, want = draw.shared()
            for parts in (1, draw.one((2, 3, 40))):
                splitting.parts_for = lambda *_, parts=parts: parts
                worst = float((run(**call).double() - want).abs().nan_to_num(math.inf).max())
                shown = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in call.items()}
                limit = 2e-3 if draw.dtype == torch.float16 else 2e-2
                wrong += [] if worst <= limit else [f"{seed}: {parts} parts: off by {worst:.3g}: {shown}"]
    splitting.parts_for = usual
    return wrong if min(used) > 1 else [f"together: {used}"]


def wrong_data_together(device: str) -> list[str]:
    """Pages and lengths that cannot be give NaN to the sequences that have them, and to no other."""
    wrong = []
    with any_batch():
        q, cache = torch.randn(6, 4, 16, device=device).half(), torch.randn(40, 64, 2, 16, device=device).half()
        for page, length in ((40, 150), (-1, 150), (1 << 30, 150), (3, 300), (3, -1)):
            tables = torch.tensor([[0, 1, 2 + i, 8 + i] for i in range(6)], device=device)
            tables[1, 2] = page
            lens = torch.tensor([150, length, 256, 129, 128, 1], device=device)
            lost = kernels()["triton.paged.decode.gqa"].run(q, cache, cache, tables, lens, None, -1, 0.0, "NHD").isnan()
            if lost.flatten(1).all(1).tolist() != [False, True, False, False, False, False] or lost[0].any():
                wrong.append(f"together, page {page}, length {length}: {lost.flatten(1).any(1).tolist()}")
        # A page that several share: the sequences that are long enough to have it.
        tables = torch.tensor([[0, 99, 2 + i, 8 + i] for i in range(6)], device=device)
        lens = torch.tensor([150, 140, 256, 129, 128, 64], device=device)
        lost = kernels()["triton.paged.decode.gqa"].run(q, cache, cache, tables, lens, None, -1, 0.0, "NHD").isnan()
        if lost.flatten(1).all(1).tolist() != [True] * 5 + [False] or lost[5].any():
            wrong.append(f"together, a shared page: {lost.flatten(1).any(1).tolist()}")
    return wrong


def wrong_data(device: str) -> list[str]:
    """Pages and lengths that cannot be give NaN, for the sequences that have them."""
    q, cache = torch.randn(3, 4, 16, device=device), torch.randn(6, 4, 2, 16, device=device)
    latent = torch.randn(6, 4, 16, device=device).half()
    wrong = []
    for index in (torch.int32, torch.int64):
        for page, length in ((6, 7), (-1, 7), (1 << 30, 7), (2, 9), (2, -1)):
            tables = torch.tensor([[0, 1], [3, page], [4, 5]], dtype=index, device=device)
            lens = torch.tensor([8, length, 3], dtype=index, device=device)
            given = (tables, lens)
            results = {
                "pages": kernels()["triton.paged.decode.gqa"].run(q, cache, cache, *given, None, -1, 0.0, "NHD"),
                "latent": kernels()["triton.mla.decode.paged"].run(q.half(), q.half(), latent, latent, *given, 0.1),
            }
            for name, got in results.items():
                lost = got.isnan().flatten(1)
                if not bool(lost[1].all()) or bool(lost[0].any()) or bool(lost[2].any()):
                    wrong.append(f"{name}, page {page}, length {length}: {lost.any(1).tolist()}")
    return wrong + wrong_behind_the_window(device)


def wrong_behind_the_window(device: str) -> list[str]:
    """Pages a window does not reach may have been given away."""
    q, cache = torch.randn(1, 4, 16, device=device), torch.randn(8, 16, 2, 16, device=device)
    lens, run = torch.tensor([128], device=device), kernels()["triton.paged.decode.gqa"].run
    whole = torch.arange(8, device=device)[None]
    left = whole.clone().index_fill_(1, torch.arange(7, device=device), -1)
    wanted, got = (run(q, cache, cache, tables, lens, None, 12, 0.0, "NHD") for tables in (whole, left))
    return [] if torch.equal(wanted, got) else ["pages behind the window are looked at"]


def interpreted() -> list[str]:
    """What the interpreter finds wrong."""
    interpret()
    torch.manual_seed(0)
    together = wrong_together("cpu", 24 if FULL else 5) + wrong_data_together("cpu")
    return wrong_cases("cpu") + wrong_data("cpu") + wrong_draws("cpu", 16 if FULL else 4) + together


def test_the_interpreter_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import warnings\nwarnings.simplefilter('ignore')\nimport test_backend_triton_decode as t\nanswer(t.interpreted())"
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
    assert wrong_cases(device) + wrong_data(device) + wrong_draws(device, 90 if FULL else 30) == []


@pytest.mark.gpu
def test_sequences_that_begin_alike_on_a_device(device: str) -> None:
    assert wrong_together(device, 150 if FULL else 30) + wrong_data_together(device) == []


@pytest.mark.gpu
def test_a_graph_works_with_what_its_tables_hold_later(device: str) -> None:
    """Captured where nothing is common; replayed where much is, for sequences of other lengths."""
    with any_batch():
        q, cache = torch.randn(13, 8, 64, device=device).half(), torch.randn(300, 16, 2, 64, device=device).half()
        tables = torch.arange(13 * 20, device=device).view(13, 20).int()
        lens = torch.full((13,), 20, device=device, dtype=torch.int32)
        plan = kernels()["triton.paged.decode.gqa"].run.direct  # type: ignore[attr-defined]
        function, tensors = plan(q, cache, cache, tables, lens, None, -1, 0.0, "NHD")
        function(*tensors)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            captured = function(*tensors)
        for common in (0, 3, 12, 19):
            tables.copy_(torch.arange(13 * 20).view(13, 20))
            tables[:, :common] = tables[:1, :common].clone()
            lens.copy_(torch.arange(13) + max(16 * common, 1))
            graph.replay()
            want = [
                attended(q[b], *(read(cache, tables[b], int(lens[b])) for _ in range(2)), 0.125, -1, 0.0)
                for b in range(13)
            ]
            assert float((captured.double() - torch.stack(want)).abs().max()) < 2e-3, common


@pytest.mark.gpu
def test_calls_can_be_captured_and_go_straight(device: str) -> None:
    """Twice the same bits, replayed too, whatever the number of parts."""
    for seed in range(30):
        draw = Draw(seed, device)
        run, call, _ = (draw.dense, draw.paged, draw.latent, draw.masked)[seed % 4]()
        first = run(**call)
        function, tensors = run.direct(**call)  # type: ignore[attr-defined]
        assert all(torch.equal(function(*tensors), first) for _ in range(3)), seed
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = function(*tensors)
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, first), seed
