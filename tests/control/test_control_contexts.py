"""Settings for a while: `with lz.prefer(…)` and the others hold for the calls inside, and for no other call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from processes import SUPPORT, forked
from told_apart import X, served
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("two_kernels"),
]


# --- each of them, alone and nested -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (lambda: lz.prefer("two"), "two"),
        (lambda: lz.prefer("one"), "one"),
        (lambda: lz.prefer("two", "one"), "one"),
        (lambda: lz.avoid("one"), "two"),
        (lambda: lz.avoid("one", "two"), "torch"),
        (lambda: lz.disabled(), "lz_cpu"),
        (lambda: lz.deterministic(), "two"),
        (lambda: lz.deterministic(False), "one"),
        (lambda: lz.avoid("nobody"), "one"),
        (lambda: lz.prefer("xformers"), "one"),
        (lambda: lz.disabled("one"), "two"),
        (lambda: lz.disabled("one", "two"), "torch"),
        (lambda: lz.prefer(), "one"),
    ],
)
def test_the_calls_inside_and_no_others(context: Callable[[], Any], wanted: str) -> None:
    for _ in range(3):
        assert served() == "one"
        with context():
            assert [served(), served(), served()] == [wanted] * 3
            assert served(X[:3]) == wanted
            # What is asked is answered for the calls made here.
            asked = lz.which("rms_norm", X).kernel_id
            assert asked == lz.explain("rms_norm", X).chosen and asked.startswith(wanted)
        assert served() == "one" and lz.which("rms_norm", X).kernel_id == "one.norm"


def test_preferring_is_by_order_and_only_by_points() -> None:
    with lz.prefer("two", "one"):
        scores = {c.kernel_id: c.score for c in lz.explain("rms_norm", X).candidates if c.accepted}
    # 21 and 20 points: not enough to overturn a priority of five more.
    assert scores["two.norm"] == 76.0 and scores["one.norm"] == 80.0


def test_the_inner_one_comes_first() -> None:
    with lz.prefer("two"):
        assert served() == "two"
        with lz.prefer("one"):
            assert served() == "one"
            with lz.deterministic():
                assert served() == "two"
                with lz.deterministic(False):
                    assert served() == "one"
                    with lz.disabled():
                        assert served() == "lz_cpu"
                    assert served() == "one"
                assert served() == "two"
            with lz.avoid("one"):
                assert served() == "two"
            assert served() == "one"
        assert served() == "two"
    assert served() == "one"


def test_preferences_of_several_blocks_add_up() -> None:
    with lz.prefer("torch"):
        assert served() == "torch"
        with lz.prefer("two"):
            # 21 points for the inner one, 20 for the outer.
            scores = {c.kernel_id: c.score for c in lz.explain("rms_norm", X).candidates if c.accepted}
            assert scores["two.norm"] == 76.0 and scores["torch.rms_norm"] == 70.0 and scores["one.norm"] == 60.0


def test_an_exception_that_passes_restores_the_outer_one() -> None:
    with lz.prefer("two"):
        with pytest.raises(ZeroDivisionError), lz.disabled():
            assert served() == "lz_cpu"
            raise ZeroDivisionError
        assert served() == "two"
    with pytest.raises(KeyboardInterrupt), lz.avoid("one"):
        raise KeyboardInterrupt
    assert served() == "one"


def test_a_failed_call_inside_leaves_nothing_behind() -> None:
    with lz.prefer("two"):
        for _ in range(3):
            with pytest.raises(lz.InvalidCallError):
                lz.rms_norm(X, torch.ones(3))
        assert served() == "two"
    assert served() == "one"


@pytest.mark.parametrize("bad", [3, None, "", ["one"]])
def test_what_is_no_library_is_refused_at_the_door(bad: Any) -> None:
    with pytest.raises((lz.ConfigurationError, TypeError)) as caught, lz.prefer(bad):
        raise AssertionError("entered")
    assert "prefer_sources" in str(caught.value) or isinstance(caught.value, TypeError)
    assert served() == "one"


def test_as_decorators() -> None:
    @lz.prefer("two")
    def preferring() -> str:
        return served()

    @lz.disabled()
    def without() -> str:
        return served()

    @lz.deterministic()
    @lz.avoid("two")
    def both() -> str:
        return served()

    for _ in range(3):
        assert (preferring(), without(), both(), served()) == ("two", "lz_cpu", "torch", "one")
    with lz.avoid("one"):
        assert preferring() == "two" and without() == "lz_cpu"
    assert preferring.__name__ == "preferring"


def test_a_kernel_sees_the_context_it_is_called_in() -> None:
    """Calls that a kernel makes itself are made in the same context."""

    def outer(input: Tensor) -> Tensor:
        return lz.rms_norm(input)

    lz.register_kernel(
        operation="activation.gelu", kernel_id="nested.gelu", platform="cpu", supported_dtypes=["float32"], priority=99
    )(outer)
    try:
        for _ in range(3):
            assert torch.equal(lz.gelu(X), X + 1.0)
            with lz.prefer("two"):
                assert torch.equal(lz.gelu(X), X + 2.0)
    finally:
        lz.unregister_kernel("nested.gelu")


@pytest.mark.parametrize("door", ["out", "numpy", "operator", "compiled", "vmap"])
def test_whichever_way_a_call_comes_in(door: str) -> None:
    compiled = torch.compile(lambda x: lz.rms_norm(x), fullgraph=True, backend="aot_eager")
    doors: dict[str, Callable[[], Any]] = {
        "out": lambda: lz.rms_norm(X, out=torch.empty_like(X)),
        "numpy": lambda: torch.from_numpy(lz.rms_norm(X.numpy())),
        "operator": lambda: torch.ops.layerzero.rms_norm(X),
        "compiled": lambda: compiled(X),
        "vmap": lambda: torch.vmap(lz.rms_norm)(X),
    }
    for _ in range(3):
        assert torch.equal(doors[door](), X + 1.0)
        with lz.prefer("two"):
            assert torch.equal(doors[door](), X + 2.0)


# --- beside everything else that may be said --------------------------------------------------------------------------


def test_a_change_from_code_reaches_the_calls_of_a_block_that_says_nothing_about_it() -> None:
    with lz.avoid("nobody"):
        assert served() == "one"
        lz.configure(prefer_sources=["two"])
        assert served() == "two"
        lz.force_kernel("rms_norm", "one.norm")
        assert served() == "one"
        lz.unforce_kernel("rms_norm")
        lz.reset()
        assert served() == "one"


def test_a_block_stands_above_code() -> None:
    lz.configure(prefer_sources=["two"], deterministic=True)
    assert served() == "two"
    with lz.prefer("one"):
        assert served() == "two", "deterministic still"
        with lz.deterministic(False):
            assert served() == "one"
    assert served() == "two"


def test_the_call_itself_stands_above_all() -> None:
    lz.force_kernel("rms_norm", "one.norm")
    with lz.avoid("one"):
        assert served() == "one"
    lz.unforce_kernel("rms_norm")
    with lz.prefer("two"):
        assert torch.equal(lz.run_kernel("one.norm", X), X + 1.0)
        # What torch is told of determinism is said of the call.
        with lz.deterministic(False), lz.prefer("one"):
            torch.use_deterministic_algorithms(True)
            try:
                assert served() == "two"
            finally:
                torch.use_deterministic_algorithms(False)
            assert served() == "one"


def test_a_kernel_registered_inside_is_there() -> None:
    with lz.prefer("one"):
        assert served() == "one"

        @lz.register_kernel(
            operation="norm.rms", kernel_id="three.norm", platform="cpu", supported_dtypes=["float32"], priority=99
        )
        def three(input: Tensor, eps: float) -> Tensor:
            return input + 3.0

        assert torch.equal(lz.rms_norm(X), X + 3.0)
        lz.unregister_kernel("three.norm")
        assert served() == "one"


LAYERS = """
    import os, sys
    sys.path.insert(0, {tests!r})
    import logging, warnings
    warnings.simplefilter("ignore")
    import layerzero as lz
    from told_apart import register, served
    import torch
    register()
    said = [served()]
    lz.configure(prefer_sources=["two"])
    said.append(served())
    with lz.prefer("one"):
        said.append(served())
        said.append("two" if torch.equal(lz.run_kernel("two.norm", torch.ones(2, 8)), torch.ones(2, 8) + 2) else "?")
    said.append(served())
    lz.reset()
    said.append(served())
    origin = {{s.key: s.origin for s in lz.settings()}}["prefer_sources"]
    answer([said, origin])
"""


@pytest.mark.parametrize("by", ["nothing", "file", "environment", "both"])
def test_each_layer_stands_above_the_ones_below(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """call > context > code > environment > file; each in turn says the contrary of the one below."""
    monkeypatch.chdir(tmp_path)
    below, layer = "one", "default"
    if by in ("file", "both"):
        (tmp_path / "layerzero.yaml").write_text("version: 1\nprefer_sources: [two]\n")
        below, layer = "two", "project_file"
    if by in ("environment", "both"):
        monkeypatch.setenv("LAYERZERO_PREFER", "one" if by == "both" else "two")
        below, layer = ("one" if by == "both" else "two"), "environment"
    said, origin = forked(LAYERS.format(tests=str(SUPPORT)), path=[SUPPORT])
    assert said == [below, "two", "one", "two", "two", below]
    assert origin["layer"] == layer


def test_there_may_be_any_number_of_different_blocks() -> None:
    """Those nobody is inside of are forgotten; one that somebody is inside of stays in force."""
    found = forked(
        """
        import layerzero as lz, torch
        from layerzero.control import Context
        x = torch.ones(2, 8)
        outside = lz.which("rms_norm", x).kernel_id
        with lz.disabled():
            inside = lz.which("rms_norm", x).kernel_id
            for size in range(2000):
                with Context(memory_headroom_mb=size):
                    pass
            still = lz.which("rms_norm", x).kernel_id
        answer([outside, inside, still, lz.which("rms_norm", x).kernel_id])
        """
    )
    outside, inside, still, after = found
    assert inside == still == "lz_cpu.ref.norm.rms" and outside == after != inside
