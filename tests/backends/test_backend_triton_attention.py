"""Attention of many queries in Triton: what is declared, and what is computed, in the interpreter and on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adapter_cases as cases
import described
import pytest
import torch
import torch_references
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreting import interpret
from processes import SUPPORT, forked
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

OPS = {
    "triton.attention": "attention.standard.prefill",
    "triton.attention.gqa": "attention.gqa.prefill",
    "triton.attention.cross": "attention.cross.prefill",
    "triton.attention.masked": "attention.standard.prefill",
    "triton.attention.masked.gqa": "attention.gqa.prefill",
    "triton.attention.masked.cross": "attention.cross.prefill",
}
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if a device were here."""
    with described.registered("triton", "3.6.0"):
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

KEYS = (4, 8, 512, 128)
CALL = {"query": (4, 32, 512, 128), "key": KEYS, "value": KEYS}
MASKED = {"causal": False}
TOO_WIDE = {"query": (4, 32, 512, 264), "key": (4, 8, 512, 264), "value": KEYS}


@pytest.mark.parametrize(
    ("device", "dtype", "flags", "more", "reason"),
    [
        ("h200", "bfloat16", (), {}, None),
        ("h200", "bfloat16", ("--capturing", "--deterministic"), {}, None),
        ("a100", "float16", (), {"window_left": 100, "softcap": 50.0, "scale": 0.1}, None),
        ("h200", "float16", (), {"causal": False, "window_right": 3}, None),
        ("h200", "float32", (), {}, "[DTYPE_UNSUPPORTED]"),
        ("t4", "float16", (), {}, "[SM_TOO_OLD]"),
        ("h200", "float16", ("--requires-grad",), {}, "[AUTOGRAD_UNSUPPORTED]"),
        ("h200", "float16", (), {"dropout_p": 0.1}, "[PARAM_UNSUPPORTED]"),
    ],
)
def test_what_is_declared(
    device: str, dtype: str, flags: tuple[str, ...], more: dict[str, Any], reason: str | None
) -> None:
    for layout, order in (("BHSD", (0, 1, 2, 3)), ("BSHD", (0, 2, 1, 3))):
        shapes = {name: tuple(shape[i] for i in order) for name, shape in CALL.items()}
        answered = described.ask(OPS["triton.attention.gqa"], device, shapes, dtype, *flags, layout=layout, **more)
        reasons = answered["triton.attention.gqa"]
        assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((4, 1, 1, 512), "bool", None),
        ((512, 512), "bfloat16", None),
        ((1, 32, 512, 512), "float32", None),
        ((1, 32, 512, 512), "float64", "[ATTN_MASK_UNSUPPORTED]"),
    ],
)
def test_masks_that_are_declared(shape: tuple[int, ...], dtype: str, reason: str | None) -> None:
    shapes = {**CALL, "attn_mask": shape}
    for kernel, more in (("triton.attention.masked.gqa", MASKED), ("triton.attention.masked.cross", {})):
        options = {"dtypes": {"attn_mask": dtype}, "layout": "BHSD", **more}
        reasons = described.ask(OPS[kernel], "h200", shapes, "bfloat16", **options)[kernel]
        assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_wide_heads_and_slopes_are_refused() -> None:
    wide = described.ask(OPS["triton.attention.gqa"], "h200", TOO_WIDE, "bfloat16", layout="BHSD")
    assert wide["triton.attention.gqa"], "heads of more than 256"
    slopes = described.ask(OPS["triton.attention.gqa"], "h200", {**CALL, "alibi_slopes": (32,)}, layout="BHSD")
    assert slopes["triton.attention.gqa"], "ALiBi"


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_blocks_fit_into_shared_memory(shared: int) -> None:
    attention = import_module("layerzero.backends.triton.attention")
    for width in (16, 32, 64, 128, 256):
        for seq_q in (1, 17, 64, 65, 4096):
            for mask in (0, 1, 2, 4):
                cut = attention.blocks_for(width, seq_q, mask, shared)
                staged = cut.stages * cut.keys * (4 * width + cut.rows * mask)
                assert cut.rows * width * 2 + staged <= shared, cut
                assert cut.span % cut.keys == 0 and cut.rows >= min(seq_q, 64), cut


# --- what is computed -------------------------------------------------------------------------------------------------


def kernels() -> dict[str, cases.Kernel]:
    """The kernels, for float32 as well, of which there are more cases: the interpreter multiplies it exactly."""
    cases.load_backends()
    found = import_module(f"{cases.PACKAGE}.backends.triton.attention").KERNELS
    return {
        rules["kernel_id"]: cases.Kernel(
            # The cases have narrow heads. What is declared is what was run on a device.
            {**rules, "dtypes": ["float32", *rules["dtypes"]], "conditions": [], "dims": {}},
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
        ran = set()
        for case in cases.cases(kernel.ops[0]):
            # The interpreter multiplies matrices of bfloat16 as if they were integers; a device rounds float32.
            used = {case.dtypes[key] for key in ("query", "key", "value")}
            left_out = {"bfloat16"} if device == "cpu" else {"float32"}
            # By zero, no weight, a NaN among values gives NaN: that is allowed.
            behind = case.name in ("nan_value_behind_the_causal_bound", "nan_outside_the_window")
            if cases.reason_to_skip(kernel, case) or used & left_out or behind:
                continue
            place = None if device == "cpu" else device
            wrong += [f"{name}: {case.name}: {problem}" for problem in cases.run(kernel, case, place)]
            ran.add(case.name)
        least = {"cpu": 15, "cuda": 2}[device.partition(":")[0]]
        wrong += [] if len(ran) >= least else [f"{name}: only {sorted(ran)} ran"]
    return wrong if set(found) == set(OPS) else [f"there are {sorted(found)}"]


MASKS: dict[str, tuple[tuple[bool, bool, bool], bool]] = {
    # Which of batch, heads and queries it tells apart, and whether it has two dimensions only.
    "padding": ((True, False, False), False),
    "queries": ((True, False, True), False),
    "heads": ((False, True, True), False),
    "all": ((True, True, True), False),
    "matrix": ((False, False, True), True),
    "row": ((False, False, False), True),
}


@st.composite
def calls(draw: st.DrawFn, device: str) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """A call, and blocks that are small enough for several to be needed, or none for the usual ones."""

    def one(*of: Any) -> Any:
        return draw(st.sampled_from(of))

    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = torch.float16 if device == "cpu" else one(torch.float16, torch.bfloat16)
    batch, kv_heads, group, layout = one(1, 2), one(1, 2), one(1, 1, 3), one("BSHD", "BHSD")
    seq_q, seq_k = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    head_dim, v_dim = one(1, 16, 24, 64, 80), one(5, 16, 32)

    def operand(heads: int, tokens: int, width: int) -> Tensor:
        tokens_first, gap = one(True, False), one(0, 0, 8, 3)
        shape = (batch, tokens, heads) if tokens_first else (batch, heads, tokens)
        found = torch.randn(*shape, width + gap, generator=generator).to(dtype).to(device)[..., :width]
        return found if tokens_first == (layout == "BSHD") else found.transpose(1, 2)

    call: dict[str, Any] = {
        "query": operand(kv_heads * group, seq_q, head_dim),
        "key": operand(kv_heads, seq_k, head_dim),
        "value": operand(kv_heads, seq_k, v_dim),
        "attn_mask": None,
        "causal": one(False, True),
        "scale": one(None, None, 0.3, -0.2, 0.0),
        "window_left": one(-1, -1, 0, 3, 20, 1000),
        "window_right": one(-1, -1, 0, 5, 1000),
        "softcap": one(0.0, 0.0, 2.0, 50.0, 1e20),
        "layout": layout,
    }
    form = one(None, *MASKS)
    if form is not None:
        apart, flat = MASKS[form]
        sizes = [n if own else 1 for n, own in zip((batch, kv_heads * group, seq_q), apart, strict=True)]
        kind = one("bool", "empty rows", "tail", "own", "float32", "infinite", "least")
        mask = torch.randn(*sizes, seq_k + one(0, 3), generator=generator)[..., :seq_k]
        if kind == "empty rows":
            mask = mask.where(torch.rand(*sizes, 1, generator=generator) > 0.5, -1.0)
        elif kind == "tail":
            mask = mask.where(torch.arange(seq_k) < draw(st.integers(0, seq_k)), -1.0)
        elif kind == "infinite":
            mask = mask.where(mask > -0.5, -math.inf)
        elif kind == "least":
            mask = mask.where(mask > 0.0, LEAST)
        mask = mask > 0.0 if kind in ("bool", "empty rows", "tail") else mask.to(dtype) if kind == "own" else mask
        mask = mask.to(device)
        call["attn_mask"] = mask[0, 0] if flat else mask.expand(batch, -1, -1, -1) if one(True, False) else mask
    return call, one((16, 16, 4, 1, 32), (32, 16, 4, 2, 32), (32, 32, 4, 2, 0), None)


def reference(call: dict[str, Any]) -> Tensor:
    """What a call must give, in float64."""
    mask = call["attn_mask"]
    options = {
        "attn_mask": mask if mask is None or mask.dtype == torch.bool else mask.double(),
        "window": (call.get("window_left", -1), call.get("window_right", -1)),
        "softcap": call["softcap"],
        "layout": call["layout"],
    }
    operands = (call[name].double() for name in ("query", "key", "value"))
    with torch.device(call["query"].device):
        return torch_references.attention(*operands, call["causal"], call["scale"], **options)


def wrong(call: dict[str, Any], blocks: tuple[int, ...] | None = None) -> str | None:
    """What is wrong with what a call gives, if anything."""
    cases.load_backends()
    module = import_module(f"{cases.PACKAGE}.backends.triton.attention")
    function, tensors = module.plan(**call, blocks=None if blocks is None else module.Blocks(*blocks))
    got, want = function(*tensors), reference(call)
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 3e-2}[got.dtype]
    off = float(((got.double() - want).abs() - tolerance * want.abs()).nan_to_num(math.inf).max())
    shown = {k: (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else v for k, v in call.items()}
    return None if off <= tolerance and got.shape == want.shape else f"off by {off:.3g}: {shown} {blocks}"


def search(device: str, examples: int) -> None:
    """Looks for a call that gives something wrong, and raises with it."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        # Smaller calls are not looked for on a device: each kind is compiled anew.
        phases=[Phase.generate, Phase.shrink] if device == "cpu" else [Phase.generate],
    )
    @given(calls(device))
    def agrees(drawn: tuple[dict[str, Any], tuple[int, ...] | None]) -> None:
        problem = wrong(*drawn)
        assert problem is None, problem

    agrees()


def wrong_bounds(device: str) -> list[str]:
    """Bounds at every place within a block of keys, with fewer keys than queries too."""
    found = []
    for seq_k in range(23, 58):
        q, k = (torch.randn(1, n, 1, 16, device=device).half() for n in (40, seq_k))
        for left, right in ((-1, 0), (5, 0), (3, 7), (20, -1)):
            call = simple(q, k) | {"window_left": left, "window_right": right}
            found.append(wrong(call, (16, 16, 4, 1, 16)))
    return [problem for problem in found if problem is not None]


def simple(query: Tensor, key: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """A call without bounds, with keys for values."""
    call = {"query": query, "key": key, "value": key, "attn_mask": mask, "causal": False, "scale": None}
    return call | {"window_left": -1, "window_right": -1, "softcap": 0.0, "layout": "BSHD"}


def wrong_ends(device: str) -> list[str]:
    """Keys that a mask leaves out at either end, and heads that take turns in the cache."""
    cases.load_backends()
    module, found = import_module(f"{cases.PACKAGE}.backends.triton.attention"), []
    q, k = (torch.randn(1, 70, n, 16, device=device).half() for n in (6, 3))
    key, usual = torch.arange(70, device=device), module._SHARED_BYTES
    for first, last in ((0, 0), (0, 1), (0, 32), (31, 33), (32, 70), (33, 64), (64, 65), (69, 70)):
        mask = (key >= first) & (key < last)
        found += [wrong(simple(q, k, one), (32, 16, 4, 1, 32)) for one in (mask[None], mask.expand(70, 70).clone())]
    for kv_heads in (1, 2):
        module._SHARED_BYTES = kv_heads * 70 * 32 * 2
        found.append(wrong(simple(q, k), (32, 16, 4, 1, 32)))
    module._SHARED_BYTES = usual
    return [problem for problem in found if problem is not None]


def wrong_edges(device: str) -> list[str]:
    """NaN and infinity: what takes part gives NaN, what is masked gives nothing, a query without keys gives zeros."""
    cases.load_backends()
    run = import_module(f"{cases.PACKAGE}.backends.triton.attention").attention

    def attend(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool = False, softcap: float = 0.0) -> Tensor:
        result: Tensor = run(q, k, torch.ones_like(k), mask, causal, None, -1, -1, softcap, "BHSD")
        return result[0, 0, :, 0]

    q, k = (torch.randn(1, 1, 40, 16, device=device).half() for _ in range(2))
    lost_query, lost_key, vast = q.clone(), k.clone(), q.clone()
    lost_query[0, 0, 3], lost_key[0, 0, 5], vast[0, 0, 7] = math.nan, math.nan, math.inf
    no_fifth = torch.ones(40, dtype=torch.bool, device=device)
    no_fifth[5] = False
    bias = torch.zeros(1, 40, device=device).masked_fill_(~no_fifth, -math.inf)
    rows = torch.ones(40, 40, dtype=torch.bool, device=device)
    rows[3] = False
    found = {
        "a query that is NaN": (attend(lost_query, k, None).isnan().nonzero().flatten().tolist(), [3]),
        "and may attend to nothing": (attend(lost_query, k, rows).tolist(), [float(i != 3) for i in range(40)]),
        "a key that is NaN": (attend(q, lost_key, None, True).isnan().nonzero().flatten().tolist(), list(range(5, 40))),
        "which is masked out": (attend(q, lost_key, no_fifth[None]).tolist(), [1.0] * 40),
        "by minus infinity": (attend(q, lost_key, bias).tolist(), [1.0] * 40),
        "under a cap": (attend(q, lost_key, bias, softcap=5.0).tolist(), [1.0] * 40),
        "infinite scores": (attend(vast, k.abs(), None).isnan().nonzero().flatten().tolist(), [7]),
    }
    return [f"{name}: {got}, expected {want}" for name, (got, want) in found.items() if got != want]


def interpreted() -> list[str]:
    """What the interpreter finds wrong."""
    interpret()
    torch.manual_seed(0)
    search("cpu", 60)
    return wrong_cases("cpu") + wrong_edges("cpu") + wrong_bounds("cpu") + wrong_ends("cpu")


def test_the_interpreter_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import warnings\nwarnings.simplefilter('ignore')\nimport test_backend_triton_attention as t\nanswer(t.interpreted())"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> str:
    """A device, if there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"


def real(
    sizes: tuple[int, int, int, int, int],
    mask: Callable[[int, int, int], Tensor] | None = None,
    window: int = -1,
    softcap: float = 0.0,
    v_dim: int | None = None,
    layout: str = "BHSD",
) -> dict[str, Any]:
    """A call of a model: batch, length, query heads, key/value heads and their size. Tokens lie together, as models have them."""
    batch, length, heads, kv_heads, head_dim = sizes

    def operand(heads: int, width: int) -> Tensor:
        found = torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16)
        return found.transpose(1, 2) if layout == "BHSD" else found

    return {
        "query": operand(heads, head_dim),
        "key": operand(kv_heads, head_dim),
        "value": operand(kv_heads, v_dim or head_dim),
        "attn_mask": None if mask is None else mask(batch, heads, length),
        "causal": mask is None,
        "scale": None,
        "window_left": window,
        "window_right": -1,
        "softcap": softcap,
        "layout": layout,
    }


def padding(batch: int, heads: int, length: int) -> Tensor:
    """Sequences of several lengths: (batch, 1, 1, length)."""
    lengths = torch.arange(batch, device="cuda") * 37 % length + 1
    return (torch.arange(length, device="cuda") < lengths[:, None])[:, None, None]


def padded_and_causal(batch: int, heads: int, length: int) -> Tensor:
    """The same on the left, and no key after the query: (batch, 1, length, length)."""
    return padding(batch, heads, length).flip(-1) & torch.ones(length, length, device="cuda", dtype=torch.bool).tril()


def biased(batch: int, heads: int, length: int) -> Tensor:
    """A bias for every head: (1, heads, length, length)."""
    return torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16)


REAL: dict[str, Callable[[], dict[str, Any]]] = {
    "gemma 2": lambda: real((1, 2048, 16, 8, 256), softcap=50.0),
    "bert": lambda: real((4, 512, 12, 12, 64), padding),
    "t5": lambda: real((1, 512, 12, 12, 64), biased),
    "llama padded": lambda: real((2, 2048, 8, 2, 128), padded_and_causal),
    "llama": lambda: real((1, 2048, 8, 2, 128), layout="BSHD"),
    "mistral": lambda: real((1, 6144, 4, 1, 128), window=4096),
    "gpt-oss": lambda: real((1, 2048, 16, 2, 64), window=128),
    **{f"heads of {n}": lambda n=n: real((1, 300, 4, 2, n), layout="BSHD") for n in (40, 80, 96, 160, 192)},
    "latent": lambda: real((1, 300, 4, 4, 192), v_dim=128),
    "float32 bias, wide heads": lambda: real((1, 300, 2, 1, 256), lambda *n: biased(*n).float()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_calls_of_models_on_a_device(device: str, name: str) -> None:
    """Right, the same bits each time, and in a graph."""
    torch.manual_seed(0)
    call = REAL[name]()
    assert wrong(call) is None
    module = import_module(f"{cases.PACKAGE}.backends.triton.attention")
    function, tensors = module.plan(**call)
    first = function(*tensors)
    assert all(torch.equal(function(*tensors), first) for _ in range(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = function(*tensors)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)


@pytest.mark.gpu
def test_on_a_device(device: str) -> None:
    torch.manual_seed(0)
    assert wrong_cases(device) + wrong_edges(device) + wrong_bounds(device) + wrong_ends(device) == []
    search(device, 25)


@pytest.mark.gpu
def test_tokens_that_lie_far_apart(device: str) -> None:
    """Places in memory beyond what 32 bits tell apart, within one block of keys."""
    apart, tokens = 1 << 26, 40
    far = torch.empty(apart * (tokens - 1) + 64, dtype=torch.float16, device=device)
    key = far.as_strided((1, tokens, 1, 64), (0, apart, 64, 1)).copy_(torch.randn(1, tokens, 1, 64))
    assert wrong(simple(torch.randn(1, 40, 1, 64, device=device).half(), key)) is None
