"""Kernels of one's own: what is registered is chosen, adapted to, and taken away; what is wrong is refused whole."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from torch import Tensor

X = torch.linspace(-2.0, 2.0, 32).reshape(4, 8)
Q, K, V = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)

Seen = list[dict[str, Any]]


@pytest.fixture
def mine() -> Iterator[Callable[..., Seen]]:
    """Registers kernels that note what they are given; takes them away again."""
    known: list[str] = []

    def add(kernel_id: str = "mine.kernel", **given: Any) -> Seen:
        seen: Seen = []

        def my_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            seen.append({"x": x, "weight": weight, "eps": eps})
            wide = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
            return (wide if weight is None else wide * weight.double()).to(x.dtype)

        def my_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, layout: str) -> Tensor:
            seen.append({"q": q, "scale": scale, "causal": causal, "layout": layout})
            out = reference.attention(
                *(t.double().numpy() for t in (q, k, v)), causal=causal, scale=scale, layout=layout
            )
            return torch.from_numpy(out.values).to(q.dtype)

        operation = given.pop("operation", "norm.rms")
        function = given.pop("function", my_attention if operation.startswith("attention") else my_rms_norm)
        settings = {"platform": "cpu", "supported_dtypes": [torch.float32], "priority": 95, **given}
        assert lz.register_kernel(operation=operation, kernel_id=kernel_id, **settings)(function) is function
        known.append(kernel_id)
        return seen

    yield add
    for name in dict.fromkeys(known):
        lz.unregister_kernel(name)


def right(got: Tensor, *args: Any, tolerance: float = 1e-6, **kwargs: Any) -> None:
    """The result is what the reference kernel gives."""
    name = "norm.rms" if len(args) < 3 else "attention.gqa.prefill"
    wanted = lz.run_kernel(f"lz_cpu.ref.{name}", *args, **kwargs)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# --- register_kernel --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_measured")
def test_a_kernel_is_chosen_and_given_what_it_names(mine: Callable[..., Seen]) -> None:
    seen = mine()
    assert lz.which("rms_norm", X).kernel_id == "mine.kernel"
    right(lz.rms_norm(X), X)
    assert seen[-1]["x"] is X and seen[-1]["weight"] is None and seen[-1]["eps"] == 1e-6
    right(lz.rms_norm(X, X[0], eps=0.5), X, X[0], eps=0.5)
    assert seen[-1]["eps"] == 0.5 and seen[-1]["weight"].shape == (8,)


def test_the_decorator_of_the_specification() -> None:
    """000 §4.3, as written but for the platform."""

    @lz.register_kernel(
        operation="attention.causal",
        kernel_id="my_org.custom_attention",
        platform="cpu",
        supported_dtypes=[torch.float16, torch.bfloat16],
        max_head_dim=128,
        priority=95,
    )
    def my_custom_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = True) -> Tensor:
        return v + 1.0

    try:
        half = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
        assert lz.which("attention.causal", half, half, half).kernel_id == "my_org.custom_attention"
        assert torch.equal(lz.attention(half, half, half), half + 1.0)
        # It takes neither other dtypes, nor larger heads, nor shared ones, nor what `causal=False` would ask of it.
        wide, grouped = torch.randn(1, 4, 2, 256, dtype=torch.bfloat16), half[:, :, :1]
        codes = {
            "DTYPE_UNSUPPORTED": (Q, Q, Q),
            "HEAD_DIM_TOO_LARGE": (wide, wide, wide),
            "GQA_UNSUPPORTED": (half, grouped, grouped),
        }
        for code, call in codes.items():
            accepted, reasons = lz.validate("my_org.custom_attention", *call)
            assert not accepted and code in [reason.code for reason in reasons]
        assert not lz.validate("my_org.custom_attention", half, half, half, causal=False)[0]
    finally:
        lz.unregister_kernel("my_org.custom_attention")


def test_a_gpu_kernel_can_be_registered_and_asked_about_without_one(mine: Callable[..., Seen]) -> None:
    """000 §4.3, as written: the function is never looked into."""
    mine(
        "my_org.cuda_attention",
        operation="attention.causal",
        platform="cuda",
        min_sm=80,
        supported_dtypes=[torch.float16, torch.bfloat16],
        max_head_dim=128,
    )
    accepted, reasons = lz.validate("my_org.cuda_attention", Q.half(), Q.half(), Q.half())
    assert not accepted and "PLATFORM_MISMATCH" in [reason.code for reason in reasons]


@pytest.mark.parametrize("dtypes", [[torch.float32], ["float32"], ["torch.float32"], ("fp32", torch.float64)])
def test_dtypes_come_as_torchs_or_by_name(mine: Callable[..., Seen], dtypes: Any) -> None:
    mine(supported_dtypes=dtypes)
    (info,) = (k for k in lz.list_kernels("norm.rms") if k.kernel_id == "mine.kernel")
    assert "float32" in info.dtypes and info.backend == "mine" and info.available


def test_a_kernel_on_an_alias_serves_all_of_its_operations(mine: Callable[..., Seen]) -> None:
    seen = mine(operation="attention", supports_gqa=True)
    one = torch.randn(2, 1, 4, 8)
    for call in ((Q, K, V), (Q, Q, Q), (one, K, V), (one, Q, Q)):
        assert lz.which("attention", *call).kernel_id == "mine.kernel"
        lz.attention(*call)
    assert len(seen) == 4


def test_what_a_kernel_does_not_name_never_reaches_it(mine: Callable[..., Seen]) -> None:
    seen = mine(operation="attention", supports_gqa=True)
    mask = torch.ones(6, 6, dtype=torch.bool)
    for kwargs in (
        {"softcap": 2.0},
        {"window": 3},
        {"causal": False, "attn_mask": mask},
        {"alibi_slopes": torch.rand(4)},
    ):
        assert not lz.validate("mine.kernel", Q, K, V, **kwargs)[0]
        lz.attention(Q, K, V, **kwargs)
    assert seen == []
    lz.attention(Q, K, V, False, 0.25)
    assert (seen[-1]["causal"], seen[-1]["scale"]) == (False, 0.25)


def test_a_kernel_without_a_parameter_every_call_may_set_is_refused() -> None:
    """eps has no rule a kernel could be out by: one that ignores it would be wrong whenever it is given."""
    try:
        with pytest.raises(lz.ConfigurationError, match="eps") as caught:
            lz.register_kernel(
                operation="norm.rms", kernel_id="mine.careless", platform="cpu", supported_dtypes=["float32"]
            )(lambda input: input)
        assert caught.value.code == "BAD_ADAPTER"
    finally:
        left = [k.kernel_id for k in lz.list_kernels() if k.kernel_id == "mine.careless"]
        for name in left:
            lz.unregister_kernel(name)
    assert left == []


# --- adaptation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["BSHD", "BHSD"])
@pytest.mark.parametrize("given", ["BSHD", "BHSD"])
def test_a_kernel_of_one_layout_serves_the_other(mine: Callable[..., Seen], own: str, given: str) -> None:
    seen = mine(operation="attention", supports_gqa=True, layouts=[own])
    call = (Q, K, V) if given == "BSHD" else tuple(t.transpose(1, 2).contiguous() for t in (Q, K, V))
    report = lz.explain("attention", *call, layout=given)
    assert report.chosen == "mine.kernel"
    assert report.candidates[0].transforms == ([] if own == given else ["layout"])
    right(lz.attention(*call, layout=given), *call, layout=given, tolerance=1e-5)
    assert seen[-1]["layout"] == own
    assert tuple(seen[-1]["q"].shape) == ((2, 6, 4, 8) if own == "BSHD" else (2, 4, 6, 8))


def test_a_kernel_of_both_layouts_is_told_which(mine: Callable[..., Seen]) -> None:
    seen = mine(operation="attention", supports_gqa=True, layouts=["BSHD", "BHSD"])
    for layout in ("BSHD", "BHSD"):
        call = (Q, K, V) if layout == "BSHD" else tuple(t.transpose(1, 2) for t in (Q, K, V))
        right(lz.attention(*call, layout=layout), *call, layout=layout, tolerance=1e-5)
        assert seen[-1]["layout"] == layout and seen[-1]["q"] is call[0]


def test_narrower_dtypes_are_widened_for_a_kernel_that_asks_for_it(mine: Callable[..., Seen]) -> None:
    seen = mine(requires_dtype="float32")
    for dtype in (torch.bfloat16, torch.float16):
        report = lz.explain("rms_norm", X.to(dtype))
        assert report.candidates[0].transforms == ["cast"]
        right(lz.rms_norm(X.to(dtype), X[0].to(dtype)), X.to(dtype), X[0].to(dtype), tolerance=1e-2)
        assert seen[-1]["x"].dtype == seen[-1]["weight"].dtype == torch.float32
    # float64 would lose by it.
    assert [r.code for r in lz.validate("mine.kernel", X.double())[1]] == ["DTYPE_UNSUPPORTED"]


def test_dtypes_are_left_alone_for_a_kernel_that_does_not(mine: Callable[..., Seen]) -> None:
    mine()
    assert not lz.validate("mine.kernel", X.bfloat16())[0]


def test_gaps_are_closed_for_a_kernel_that_wants_none(mine: Callable[..., Seen]) -> None:
    seen = mine()
    wide = torch.randn(4, 16)[:, ::2]
    assert lz.explain("rms_norm", wide).candidates[0].transforms == ["contiguous"]
    right(lz.rms_norm(wide), wide)
    assert seen[-1]["x"].is_contiguous()


def test_gaps_are_left_for_a_kernel_that_takes_them(mine: Callable[..., Seen]) -> None:
    seen = mine(layouts=["strided"])
    wide = torch.randn(4, 16)[:, ::2]
    right(lz.rms_norm(wide), wide)
    assert seen[-1]["x"] is wide


# --- versions, and taking away ----------------------------------------------------------------------------------------


def test_versions_live_side_by_side(mine: Callable[..., Seen]) -> None:
    old, new = mine(version="1.9"), mine(version="1.10")
    chosen = lz.which("rms_norm", X)
    assert (chosen.kernel_id, chosen.version) == ("mine.kernel", "1.10")
    lz.rms_norm(X)
    lz.run_kernel("mine.kernel@1.9", X)
    assert (len(old), len(new)) == (1, 1)
    assert {k.version for k in lz.list_kernels("norm.rms") if k.kernel_id == "mine.kernel"} == {"1.9", "1.10"}
    with pytest.raises(lz.UnknownKernelError):
        lz.validate("mine.kernel@7", X)


def test_one_version_can_be_taken_away(mine: Callable[..., Seen]) -> None:
    mine(version="1")
    mine(version="2")
    lz.unregister_kernel("mine.kernel@2")
    assert lz.which("rms_norm", X).version == "1"


def test_the_same_version_twice_is_refused_and_changes_nothing(mine: Callable[..., Seen]) -> None:
    seen = mine()
    with pytest.raises(lz.ConfigurationError, match="twice"):
        mine()
    lz.rms_norm(X)
    assert len(seen) == 1


def test_what_was_taken_away_is_gone(mine: Callable[..., Seen]) -> None:
    before = (len(lz.list_kernels()), lz.which("rms_norm", X))
    seen = mine("gone.kernel")
    lz.rms_norm(X)
    lz.unregister_kernel("gone.kernel")
    assert (len(lz.list_kernels()), lz.which("rms_norm", X)) == before
    lz.rms_norm(X)
    assert len(seen) == 1
    for use in (lambda: lz.unregister_kernel("gone.kernel"), lambda: lz.run_kernel("gone.kernel", X)):
        with pytest.raises(lz.UnknownKernelError):
            use()
    mine("gone.kernel")


def test_a_kernel_may_take_itself_away_and_call_others() -> None:
    def once(input: Tensor, eps: float) -> Tensor:
        lz.unregister_kernel("once.kernel")
        return lz.rms_norm(input.double(), eps=eps).float()

    lz.register_kernel(
        operation="norm.rms", kernel_id="once.kernel", platform="cpu", supported_dtypes=["float32"], priority=99
    )(once)
    right(lz.rms_norm(X), X)
    assert lz.which("rms_norm", X).kernel_id != "once.kernel"


# --- what is refused --------------------------------------------------------------------------------------------------


def named(input: Tensor, eps: float) -> Tensor:
    """A kernel of norm.rms."""
    return input * eps


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "operation": (lz.UnknownOperationError, "rms_norm", {"operation": "rms_nrm"}),
    "platform": (lz.CapabilitiesError, "cuda", {"platform": "gpu"}),
    "dtype": (lz.CapabilitiesError, "float32", {"supported_dtypes": ["flaot32"]}),
    "no-dtypes": (lz.CapabilitiesError, "dtype", {"supported_dtypes": []}),
    "layout": (lz.CapabilitiesError, "contiguous", {"layouts": ["contigous"]}),
    "capability": (lz.CapabilitiesError, "deterministic", {"determinstic": True}),
    "dimension": (lz.CapabilitiesError, "hidden", {"dims": {"hiden": {"max": 3}}}),
    "condition": (lz.CapabilitiesError, "expression", {"conditions": ["rows >"]}),
    "priority": (lz.CapabilitiesError, "100", {"priority": 101}),
    "id": (lz.CapabilitiesError, "empty", {"kernel_id": ""}),
    "parameter": (lz.ConfigurationError, "input, weight, eps", {"function": lambda inputs: inputs}),
    "keyword-only": (lz.ConfigurationError, "keyword", {"function": lambda *, input: input}),
    "builtin": (lz.ConfigurationError, "wrap it", {"function": torch.rsqrt}),
    "no-function": (lz.ConfigurationError, "callable", {"function": 3}),
}


@pytest.mark.parametrize(("kind", "words", "given"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    kind: type[Exception], words: str, given: dict[str, Any]
) -> None:
    before = [(k.kernel_id, k.version) for k in lz.list_kernels()]
    settings = {
        "operation": "norm.rms",
        "kernel_id": "mine.wrong",
        "platform": "cpu",
        "supported_dtypes": ["float32"],
        **given,
    }
    function = settings.pop("function", named)
    with pytest.raises(kind) as caught:
        lz.register_kernel(**settings)(function)
    assert type(caught.value) is kind and words in str(caught.value)
    assert [(k.kernel_id, k.version) for k in lz.list_kernels()] == before


# --- documents --------------------------------------------------------------------------------------------------------

DOCUMENT: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "documented",
    "backend_version": "3.1",
    "platform": "cpu",
    "ops": {
        "norm.rms": [
            {
                "kernel_id": "documented.norm",
                "dtypes": ["float32"],
                "requires_layouts": ["contiguous"],
                "priority": 96,
                "params": {"eps": {}},
            }
        ]
    },
}

YAML = """
schema_version: "1.0"
backend: documented
backend_version: "3.1"
platform: cpu
ops:
  norm.rms:
    - kernel_id: documented.norm
      dtypes: [float32]
      requires_layouts: [contiguous]
      priority: 96
      params: {eps: {}}
"""


def written(folder: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["dict", "json", "yaml", "path", "path-text", "yaml-path"])
def test_a_document_comes_in_every_form(tmp_path: Path, kind: str) -> None:
    document: Any = {
        "dict": DOCUMENT,
        "json": json.dumps(DOCUMENT),
        "yaml": YAML,
        "path": written(tmp_path, "c.json", json.dumps(DOCUMENT, indent=2)),
        "path-text": str(written(tmp_path, "d.json", json.dumps(DOCUMENT))),
        "yaml-path": written(tmp_path, "c.yaml", YAML),
    }[kind]
    lz.register_backend(document, {"documented.norm": lambda input, eps: input + eps})
    try:
        chosen = lz.which("rms_norm", X)
        assert (chosen.kernel_id, chosen.version) == ("documented.norm", "3.1")
        assert torch.equal(lz.rms_norm(X, eps=2.0), X + 2.0)
        assert "documented" in {b["name"] for b in lz.doctor(file=io.StringIO()).backends}
    finally:
        lz.unregister_kernel("documented.norm")


@pytest.mark.parametrize("document", [DOCUMENT, YAML], ids=["dict", "yaml"])
def test_the_version_that_was_found_replaces_the_documents(document: Any) -> None:
    lz.register_backend(document, {"documented.norm": lambda input, eps: input + eps}, version="3.2.dev1+local")
    try:
        assert lz.which("rms_norm", X).version == "3.2.dev1+local"
    finally:
        lz.unregister_kernel("documented.norm")


def test_numpy_calls_reach_a_kernel_as_tensors(mine: Callable[..., Seen]) -> None:
    seen = mine()
    got = lz.rms_norm(X.numpy())
    assert isinstance(got, np.ndarray) and isinstance(seen[-1]["x"], Tensor)
    assert seen[-1]["x"].data_ptr() == X.data_ptr()


def changed(**top: Any) -> dict[str, Any]:
    """The document with something else in it."""
    return {**DOCUMENT, **top}


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "schema": (changed(schema_version="9"), {}, lz.CapabilitiesError, "'1.0'"),
    "operation": (changed(ops={"norm.rsm": []}), {}, lz.CapabilitiesError, "norm.rms"),
    "not-json": ('{"backend": ', {}, lz.CapabilitiesError, "line 1"),
    "not-yaml": ("a: [1\nb: 2", {}, lz.CapabilitiesError, "line"),
    "no-file": ("no/such/file.json", {}, FileNotFoundError, "no/such/file.json"),
    "unknown-kernel": (DOCUMENT, {"documented.nrm": named}, lz.UnknownKernelError, "documented.norm"),
    "unknown-parameter": (DOCUMENT, {"documented.norm": lambda inpt, eps: inpt}, lz.ConfigurationError, "inpt"),
}


@pytest.mark.parametrize(("document", "kernels", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_a_document_with_a_mistake_is_refused_whole(
    document: Any, kernels: dict[str, Any], kind: type[Exception], words: str
) -> None:
    before = lz.which("rms_norm", X)
    refused: Exception | None = None
    try:
        lz.register_backend(document, kernels)
    except (lz.LayerZeroError, OSError) as error:
        refused = error
    left = [k.kernel_id for k in lz.list_kernels() if k.backend == "documented"]
    for name in left:
        lz.unregister_kernel(name)
    assert isinstance(refused, kind) and words in str(refused)
    assert left == [] and lz.which("rms_norm", X) == before
