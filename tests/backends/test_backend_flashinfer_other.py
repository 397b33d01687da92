"""FlashInfer's norms, rotary embedding and sampling: what is declared, and what is called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import adapter_cases as cases
import described
import layerzero as lz
import pytest
import torch
from described import adapter
from fake_flashinfer import FlashInfer
from layerzero import backend_files
from torch import Tensor

BACKEND, VERSION = "flashinfer", "0.6.18"
HALF = (torch.float16, torch.bfloat16)


def must(holds: bool, why: str) -> None:
    """What the library checks."""
    if not holds:
        raise ValueError(why)


class Rows(FlashInfer):
    """The library with what this is about; attention is tried elsewhere."""

    def modules(self) -> dict[str, ModuleType]:
        """Its modules by name."""
        made = super().modules()
        for function in (
            self.rmsnorm,
            self.layernorm,
            self.apply_rope_with_cos_sin_cache,
            self.top_p_sampling_from_probs,
            self.top_k_sampling_from_probs,
        ):
            made["flashinfer"].__dict__[function.__name__] = function
        return made

    def rmsnorm(
        self,
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-6,
        out: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        """flashinfer/norm/__init__.py, csrc/norm.cu."""
        must(input.dim() in (2, 3) and input.stride(-1) == 1 and weight.shape == input.shape[-1:], "shape")
        must(input.dtype in HALF and weight.dtype == input.dtype, "dtype")
        wide = input.double()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
        return wide.to(input.dtype)

    def layernorm(self, input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Tensor:
        """flashinfer/norm/__init__.py, csrc/norm.cu."""
        must(input.dim() == 2 and input.is_contiguous(), "shape")
        must(input.dtype == torch.bfloat16 and gemma.dtype == beta.dtype == torch.float32, "dtype")
        wide = torch.nn.functional.layer_norm(input.double(), input.shape[1:], gemma.double(), beta.double(), eps)
        return wide.to(input.dtype)

    def apply_rope_with_cos_sin_cache(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """flashinfer/rope.py, csrc/rope.cu."""
        self.calls.append(dict(locals()))
        must(cos_sin_cache.dtype == torch.float32, "cos_sin_cache should be float32")
        must(cos_sin_cache.is_contiguous() and positions.is_contiguous() and positions.dim() == 1, "contiguous")
        must(query.dtype in HALF and query.shape[0] == key.shape[0] == positions.shape[0], "shape")

        def turned(x: Tensor) -> Tensor:
            heads = x.view(x.shape[0], -1, head_size).double()
            cos, sin = cos_sin_cache[positions.long()].double()[:, None].chunk(2, -1)
            width = 2 * cos.shape[-1]
            part = heads[..., :width]
            a, b = part.chunk(2, -1) if is_neox else (part[..., 0::2], part[..., 1::2])
            pair = (a * cos - b * sin, b * cos + a * sin)
            part = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
            return torch.cat((part, heads[..., width:]), -1).to(x.dtype).view(x.shape)

        return turned(query), turned(key)

    def top_p_sampling_from_probs(
        self,
        probs: Tensor,
        top_p: Tensor | float,
        indices: Tensor | None = None,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
        check_nan: bool = False,
        seed: int | Tensor | None = None,
        offset: int | Tensor | None = None,
        return_valid: bool = False,
    ) -> Tensor:
        """flashinfer/sampling.py."""
        order = probs.nan_to_num(0.0).sort(-1, descending=True)
        kept = order.values.cumsum(-1) - order.values < top_p
        return self._drawn(order, kept, probs, deterministic, check_nan, seed, offset)

    def top_k_sampling_from_probs(
        self,
        probs: Tensor,
        top_k: Tensor | int,
        indices: Tensor | None = None,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
        check_nan: bool = False,
        seed: int | Tensor | None = None,
        offset: int | Tensor | None = None,
        return_valid: bool = False,
    ) -> Tensor:
        """flashinfer/sampling.py."""
        order = probs.nan_to_num(0.0).sort(-1, descending=True)
        kept = (torch.arange(probs.shape[1]) < top_k).expand(probs.shape)
        return self._drawn(order, kept, probs, deterministic, check_nan, seed, offset)

    def _drawn(
        self, order: Any, kept: Tensor, probs: Tensor, deterministic: bool, check_nan: bool, seed: Any, offset: Any
    ) -> Tensor:
        must(probs.dim() == 2 and probs.dtype == torch.float32 and probs.is_contiguous(), "dtype")
        must(deterministic and not check_nan and offset == 0 and 0 <= seed < 2**63, "seed")
        weights = order.values * kept + (order.values.sum(-1, keepdim=True) == 0.0)
        place = torch.multinomial(weights, 1, generator=torch.Generator().manual_seed(seed))
        return order.indices.gather(1, place)[:, 0].int()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered(BACKEND, VERSION):
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The library in place, and found."""
    library = Rows()
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert adapter(BACKEND).detect() == VERSION
    # The same adapter once more, as the cases of testdata/ import it.
    assert cases.adapter(BACKEND).detect() == VERSION
    return library


def kernel(name: str) -> Any:
    """A kernel's function."""
    return adapter(BACKEND).KERNELS[name]


ROPE: dict[str, tuple[int, ...]] = {"input": (2, 16, 8, 128), "cos": (64, 64), "sin": (64, 64)}
NORM: dict[str, tuple[int, ...]] = {"input": (8, 4096), "weight": (4096,)}
LOGITS: dict[str, tuple[int, ...]] = {"logits": (8, 1000)}


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "device", "flags", "more", "kernel_id", "reason"),
    [
        ("norm.rms", NORM, "bfloat16", "h200", ("--capturing",), {}, "flashinfer.rms_norm", None),
        ("norm.rms", NORM, "bfloat16", "t4", (), {}, "flashinfer.rms_norm", "[CONSTRAINT_FAILED] dtype != bfloat16"),
        ("norm.rms", NORM, "float32", "h200", (), {}, "flashinfer.rms_norm", "[DTYPE_UNSUPPORTED]"),
        ("norm.rms", {"input": (8, 4096)}, "float16", "h200", (), {}, "flashinfer.rms_norm", "["),
        (
            "norm.rms",
            NORM,
            "float16",
            "h200",
            ("--requires-grad",),
            {},
            "flashinfer.rms_norm",
            "[AUTOGRAD_UNSUPPORTED]",
        ),
        (
            "norm.layer",
            {**NORM, "bias": (4096,)},
            "bfloat16",
            "h200",
            (),
            {"dtypes": {"weight": "float32", "bias": "float32"}},
            "flashinfer.layer_norm",
            None,
        ),
        ("norm.layer", {**NORM, "bias": (4096,)}, "bfloat16", "h200", (), {}, "flashinfer.layer_norm", "[DTYPE_UNSUPP"),
        ("posenc.rope", ROPE, "bfloat16", "h200", (), {"layout": "BSHD"}, "flashinfer.rope", None),
        (
            "posenc.rope",
            {**ROPE, "input": (2, 16, 8, 160)},
            "bfloat16",
            "h200",
            (),
            {"layout": "BSHD"},
            "flashinfer.rope",
            "[HEAD_DIM_INVALID]",
        ),
        ("sampling.topp", LOGITS, "float32", "h200", (), {"p": 0.9}, "flashinfer.topp", None),
        (
            "sampling.topp",
            {**LOGITS, "uniform": (8,)},
            "float32",
            "h200",
            (),
            {"p": 0.9},
            "flashinfer.topp",
            "[INPUT_UNSUPPORTED]",
        ),
        (
            "sampling.topk",
            LOGITS,
            "float32",
            "h200",
            ("--capturing",),
            {"k": 5},
            "flashinfer.topk",
            "[CUDA_GRAPH_UNSAFE]",
        ),
    ],
)
def test_what_is_declared(
    op: str,
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    device: str,
    flags: tuple[str, ...],
    more: dict[str, Any],
    kernel_id: str,
    reason: str | None,
) -> None:
    reasons = described.ask(op, device, shapes, dtype, *flags, **more)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_sampling_wants_a_library_that_keeps_within_rows() -> None:
    with described.registered(BACKEND, "0.6.4"):
        reasons = described.ask("sampling.topp", "h200", LOGITS, "float32", p=0.9)["flashinfer.topp"]
        assert reasons[0].startswith("[VERSION_UNSUPPORTED]")
    lz.register_backend(backend_files.folder(BACKEND) / "capabilities.json", adapter(BACKEND).KERNELS, version=VERSION)


def test_norms(fake: Rows) -> None:
    torch.manual_seed(0)
    for shape in ((3, 64), (2, 5, 40), (7,)):
        x = torch.randn(shape).bfloat16()
        w, b = torch.randn(shape[-1]), torch.randn(shape[-1])
        if len(shape) > 1:
            got = kernel("flashinfer.layer_norm")(x, w, b, 1e-5)
            want = torch.nn.functional.layer_norm(x.double(), shape[-1:], w.double(), b.double(), 1e-5)
            torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
        got = kernel("flashinfer.rms_norm")(x, w.bfloat16(), 1e-6)
        want = torch.nn.functional.rms_norm(x.double(), shape[-1:], w.bfloat16().double(), 1e-6)
        assert got.shape == x.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", ["BSHD", "NHD"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot", [64, 32, 128])
@pytest.mark.parametrize("positions", [None, "row", "rows"])
def test_rope(fake: Rows, layout: str, interleaved: bool, rot: int, positions: str | None) -> None:
    torch.manual_seed(1)
    shape = (2, 6, 3, 128) if layout == "BSHD" else (6, 3, 128)
    x = torch.randn(shape).half()
    cos, sin = torch.randn(20, rot), torch.randn(20, rot)
    if rot == 128:
        cos, sin = (torch.cat((t[:, :64], t[:, :64]), -1) for t in (cos, sin))
    given = None
    if positions is not None:
        rows = shape[0] if layout == "BSHD" else 1
        given = torch.randint(20, (rows, 6) if positions == "rows" else (6,))
    plain = import_module("layerzero.backends._shared.torch_functions.position").rope
    arguments = (x, cos, sin, given, interleaved, layout)
    before = x.clone()
    got = kernel("flashinfer.rope")(*arguments)
    torch.testing.assert_close(got.double(), plain(*arguments).double(), rtol=1e-3, atol=1e-3)
    assert torch.equal(x, before)
    # The tables are joined once for as long as they hold the same.
    kernel("flashinfer.rope")(*arguments)
    assert fake.calls[-1]["cos_sin_cache"] is fake.calls[-2]["cos_sin_cache"]
    cos.mul_(2.0)
    again = kernel("flashinfer.rope")(*arguments)
    torch.testing.assert_close(again.double(), plain(*arguments).double(), rtol=1e-3, atol=1e-3)


def test_tables_that_are_too_short_are_an_error(fake: Rows) -> None:
    x, table = torch.randn(1, 6, 2, 64).half(), torch.randn(4, 32)
    with pytest.raises(lz.InvalidCallError, match=r"positions\[4\] is 4"):
        kernel("flashinfer.rope")(x, table, table.clone(), None, False, "BSHD")


@pytest.mark.parametrize(("name", "kept"), [("flashinfer.topp", 0.6), ("flashinfer.topk", 3)])
def test_draws(fake: Rows, name: str, kept: float) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    logits = probabilities.log().expand(4000, 5)
    draw = kernel(name)
    ids = draw(logits, kept, 11)
    assert ids.dtype == torch.int64 and torch.equal(ids, draw(logits, kept, 11))
    assert not torch.equal(ids, draw(logits, kept, -12))
    allowed = torch.tensor([1, 3]) if kept < 1 else torch.tensor([1, 3, 4])
    expected = torch.zeros(5)
    expected[allowed] = probabilities[allowed] / probabilities[allowed].sum()
    torch.testing.assert_close(ids.bincount(minlength=5) / 4000, expected, rtol=0.0, atol=0.04)
    assert draw(logits[:6].reshape(2, 3, 5), kept, 1).shape == (2, 3)


@pytest.mark.parametrize(("name", "kept"), [("flashinfer.topp", 0.6), ("flashinfer.topk", 3)])
def test_rows_without_probabilities(fake: Rows, name: str, kept: float) -> None:
    logits = torch.randn(4, 8)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    logits[2, 5] = torch.inf
    ids = kernel(name)(logits, kept, 3)
    assert ids[:3].tolist() == [-1, -1, -1] and 0 <= int(ids[3]) < 8


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, where it is installed."""
    with described.library_itself(BACKEND) as version:
        yield version


@pytest.mark.gpu
def test_the_library_itself_is_right(found: str) -> None:
    torch.manual_seed(0)
    for shape in ((1, 4096), (33, 1000), (2, 9, 5120)):
        for dtype in HALF:
            x, w = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[-1], device="cuda").to(dtype)
            want = torch.nn.functional.rms_norm(x.double(), shape[-1:], w.double(), 1e-6)
            allowed = 2 * cases.TOLERANCES[dtype]
            got = kernel("flashinfer.rms_norm")(x, w, 1e-6)
            torch.testing.assert_close(got.double(), want, rtol=allowed, atol=allowed)
        x, w, b = torch.randn(shape, device="cuda").bfloat16(), *torch.randn(2, shape[-1], device="cuda")
        want = torch.nn.functional.layer_norm(x.double(), shape[-1:], w.double(), b.double(), 1e-5)
        got = kernel("flashinfer.layer_norm")(x, w, b, 1e-5)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    plain = import_module("layerzero.backends._shared.torch_functions.position").rope
    for head_dim, rot in ((128, 64), (128, 128), (64, 16), (256, 128), (512, 256)):
        cos, sin = torch.randn(64, rot, device="cuda"), torch.randn(64, rot, device="cuda")
        positions = torch.randint(64, (2, 33), device="cuda")
        for interleaved in (False, True):
            x = torch.randn(2, 33, 8, head_dim, device="cuda").bfloat16()
            arguments = (x, cos, sin, positions, interleaved, "BSHD")
            got, want = kernel("flashinfer.rope")(*arguments), plain(*arguments)
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_draws_of_the_library_itself(found: str) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], device="cuda")
    logits = probabilities.log().expand(20000, 5)
    for name, kept, allowed in (("flashinfer.topp", 0.6, [1, 3]), ("flashinfer.topk", 3, [1, 3, 4])):
        ids = kernel(name)(logits, kept, 5)
        assert torch.equal(ids, kernel(name)(logits, kept, 5))
        expected = torch.zeros(5, device="cuda")
        expected[allowed] = probabilities[allowed] / probabilities[allowed].sum()
        torch.testing.assert_close(ids.bincount(minlength=5) / 20000, expected, rtol=0.0, atol=0.02)
        bad = logits[:3].clone()
        bad[0, 1], bad[1] = torch.nan, -torch.inf
        assert kernel(name)(bad, kept, 5)[:2].tolist() == [-1, -1]


@pytest.mark.gpu
def test_signatures_are_those_of_the_library(found: str) -> None:
    library, fake = import_module("flashinfer"), Rows()
    for name in ("rmsnorm", "layernorm", "apply_rope_with_cos_sin_cache", "top_p_sampling_from_probs"):
        ours = list(inspect.signature(getattr(fake, name)).parameters)
        theirs = list(inspect.signature(getattr(library, name)).parameters)
        assert ours[: len(theirs)] == theirs[: len(ours)], name
