"""The layout of a call is what it says, or the default in force: never a guess from sizes or strides."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import layerzero as lz
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    lz.reset()


def qkv(*shape: int, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


def exact(q: Tensor, k: Tensor, v: Tensor, layout: str) -> Tensor:
    """Causal attention, bottom-right, by hand."""
    if layout == "BSHD":
        return exact(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "BHSD").transpose(1, 2)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    rows, columns = q.shape[2], k.shape[2]
    allowed = torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1) @ v


def is_in(layout: str, out: Tensor, tensors: list[Tensor]) -> None:
    torch.testing.assert_close(out, exact(*tensors, layout))
    other = "BHSD" if layout == "BSHD" else "BSHD"
    assert not torch.allclose(out, exact(*tensors, other)), "the shapes would not tell a wrong layout"


# --- what is in force -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 8, 32, 8), (2, 32, 8, 8), (1, 12, 5, 4), (1, 7, 7, 4), (3, 64, 64, 4)])
def test_without_a_word_it_is_bshd_whatever_the_sizes(shape: tuple[int, ...]) -> None:
    tensors = qkv(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroWarning)
        is_in("BSHD", lz.attention(*tensors), tensors)
        assert torch.equal(lz.attention(*tensors), lz.attention(*tensors, layout="BSHD"))


def test_blocks_and_settings_change_it_and_no_remembered_call_outlives_them() -> None:
    tensors = qkv(2, 6, 4, 8)
    for _ in range(3):
        is_in("BSHD", lz.attention(*tensors), tensors)
        with lz.layout("BHSD"):
            is_in("BHSD", lz.attention(*tensors), tensors)
            is_in("BSHD", lz.attention(*tensors, layout="BSHD"), tensors)
            with lz.layout("BSHD"):
                is_in("BSHD", lz.attention(*tensors), tensors)
            with lz.prefer("torch"):
                is_in("BHSD", lz.attention(*tensors), tensors)
        is_in("BSHD", lz.attention(*tensors), tensors)
        lz.configure(default_layout="BHSD")
        is_in("BHSD", lz.attention(*tensors), tensors)
        with lz.layout("BSHD"):
            is_in("BSHD", lz.attention(*tensors), tensors)
        lz.configure(default_layout=None)
        is_in("BSHD", lz.attention(*tensors), tensors)


def test_threads_have_blocks_of_their_own() -> None:
    tensors = qkv(2, 6, 4, 8)
    inside, outside, problems = threading.Barrier(2), threading.Barrier(2), []

    def other() -> None:
        try:
            with lz.layout("BHSD"):
                inside.wait()
                is_in("BHSD", lz.attention(*tensors), tensors)
                outside.wait()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
            inside.abort()
            outside.abort()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    is_in("BSHD", lz.attention(*tensors), tensors)
    outside.wait()
    thread.join()
    assert not problems


def test_other_functions_follow_and_caches_have_a_setting_of_their_own() -> None:
    tensors = qkv(2, 6, 4, 8)
    cos, sin = (torch.rand(16, 4, dtype=torch.float64) for _ in range(2))
    cross = {layout: lz.cross_attention(*tensors, layout=layout) for layout in ("BSHD", "BHSD")}
    turned = {layout: lz.rope(tensors[0], cos, sin, layout=layout) for layout in ("BSHD", "BHSD")}
    packed = lz.rope(tensors[0][0], cos, sin)
    assert not torch.allclose(cross["BSHD"], cross["BHSD"]) and not torch.allclose(turned["BSHD"], turned["BHSD"])
    cache = torch.randn(3, 4, 4, 8)
    pages = {"block_tables": torch.tensor([[0, 1, 2]], dtype=torch.int32), "context_lens": torch.tensor([7])}
    query = torch.randn(1, 4, 8)
    paged = {n: lz.paged_attention(query, cache, cache, **pages, layout=n) for n in ("NHD", "HND")}
    assert not torch.allclose(paged["NHD"], paged["HND"])

    def check(dense: str, caches: str) -> None:
        torch.testing.assert_close(lz.cross_attention(*tensors), cross[dense])
        torch.testing.assert_close(lz.rope(tensors[0], cos, sin), turned[dense])
        torch.testing.assert_close(lz.rope(tensors[0][0], cos, sin), packed)
        torch.testing.assert_close(lz.paged_attention(query, cache, cache, **pages), paged[caches])

    check("BSHD", "NHD")
    with lz.layout("BHSD"):
        check("BHSD", "NHD")
        with lz.layout("HND"):
            check("BHSD", "HND")
    with lz.layout("HND"):
        check("BSHD", "HND")
    with lz.layout("BHSD", "HND"):
        check("BHSD", "HND")
    lz.configure(default_cache_layout="HND")
    check("BSHD", "HND")


def test_layouts_that_do_not_exist_are_refused() -> None:
    for names in (("BSDH",), (), ("BSHD", "BHSD"), ("bshd",)):
        with pytest.raises(lz.ConfigurationError) as caught:
            lz.layout(*names)
        assert caught.value.code == "BAD_LAYOUT" and caught.value.hint
    with pytest.raises(lz.ConfigurationError):
        lz.configure(default_layout="HND")


def test_the_environment_and_the_command_line_say_it_too() -> None:
    code = "import layerzero as lz, torch; x = torch.zeros(1, 6, 4, 8); print(lz.explain('attention', x, x, x).to_dict()['dims']['seq_q'])"
    told = {**os.environ, "LAYERZERO_DEFAULT_LAYOUT": "BHSD"}
    run = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        for env in (None, told)
    ]
    assert [r.stdout.strip() for r in run] == ["6", "4"], [r.stderr for r in run]
    command = [sys.executable, "-m", "layerzero", "config", "show"]
    shown = subprocess.run(command, env=told, capture_output=True, text=True, check=False).stdout
    assert "default_layout" in shown and "BHSD" in shown


# --- what is asked, written down and measured -------------------------------------------------------------------------


def test_questions_are_answered_for_the_layout_in_force() -> None:
    tensors = qkv(2, 6, 4, 8)
    kernel = lz.which("attention", *tensors).kernel_id
    for layout, seq in (("BSHD", 6), ("BHSD", 4)):
        with lz.layout(layout):
            report = lz.explain("attention", *tensors)
            assert report.to_dict()["dims"]["seq_q"] == seq
            assert lz.validate(kernel, *tensors) == (True, [])
            assert lz.which("attention", *tensors).kernel_id == report.chosen
            is_in(layout, lz.run_kernel(kernel, *tensors), tensors)


def test_calls_that_are_recorded_carry_their_layout() -> None:
    tensors = [t.float() for t in qkv(2, 6, 4, 8)]
    with lz.layout("BHSD"):
        (call,) = lz.calls_of(lz.attention, *tensors)
        (grid,) = lz.workload("attention", dtype="float32", batch=2, seq_q=6, seq_k=6, heads=4, head_dim=8)
    assert call.to_dict()["call"]["layout"] == "BHSD"
    assert (grid["layout"], grid["tensors"]["query"]["shape"]) == ("BHSD", [2, 4, 6, 8])
    (plain,) = lz.calls_of(lz.attention, *tensors)
    assert plain.to_dict()["call"]["layout"] == "BSHD"
    (shaped,) = lz.workload("attention", shapes=[(2, 6, 4, 8)], dtype="float32", layout="BHSD")
    assert (shaped["layout"], shaped["tensors"]["query"]["shape"]) == ("BHSD", [2, 4, 6, 8])


# --- gradients, graphs, transforms ------------------------------------------------------------------------------------


def gradients(tensors: list[Tensor], layout: str) -> list[Tensor]:
    return list(torch.autograd.grad(exact(*tensors, layout).square().sum(), tensors))


def test_a_backward_keeps_the_layout_of_its_forward() -> None:
    tensors = qkv(2, 6, 4, 8, grad=True)
    for call in (lz.attention, torch.ops.layerzero.attention):
        with lz.layout("BHSD"):
            out = call(*tensors)
        torch.testing.assert_close(list(torch.autograd.grad(out.square().sum(), tensors)), gradients(tensors, "BHSD"))
        out = call(*tensors)
        with lz.layout("BHSD"):
            found = list(torch.autograd.grad(out.square().sum(), tensors))
        torch.testing.assert_close(found, gradients(tensors, "BSHD"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_graph_is_of_the_layout_in_force(backend: str, grad: bool) -> None:
    tensors = qkv(2, 6, 4, 8, grad=grad)
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: lz.attention(*t) * 1.0, backend=backend, fullgraph=True)

    def check(layout: str) -> None:
        out = compiled(*tensors)
        torch.testing.assert_close(out, exact(*tensors, layout))
        if grad:
            outputs.append((out, layout))

    outputs: list[tuple[Tensor, str]] = []
    check("BSHD")
    with lz.layout("BHSD"):
        check("BHSD")
    check("BSHD")
    lz.configure(default_layout="BHSD")
    check("BHSD")
    lz.reset()
    check("BSHD")
    for out, layout in outputs:
        torch.testing.assert_close(list(torch.autograd.grad(out.square().sum(), tensors)), gradients(tensors, layout))


def test_a_graph_that_was_traced_elsewhere_is_refused_rather_than_wrong() -> None:
    tensors = qkv(2, 6, 4, 8)
    with pytest.raises(lz.InvalidCallError) as caught:
        torch.ops.layerzero.attention(*tensors, default_layout="BHSD")
    assert caught.value.code == "LAYOUT_OF_GRAPH" and "layout=" in caught.value.hint
    with lz.layout("BHSD"):
        is_in("BHSD", torch.ops.layerzero.attention(*tensors, default_layout="BHSD"), tensors)


def test_vmap_and_autocast_follow() -> None:
    tensors = qkv(3, 2, 6, 4, 8)
    single = [t.float() for t in qkv(2, 6, 4, 8)]
    for layout in ("BSHD", "BHSD"):
        with lz.layout(layout):
            batched = torch.vmap(lz.attention)(*tensors)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lowered = lz.attention(*single)
        want = torch.stack([exact(*(t[i] for t in tensors), layout) for i in range(3)])
        torch.testing.assert_close(batched, want)
        torch.testing.assert_close(lowered.float(), exact(*single, layout), rtol=2e-2, atol=2e-2)


# --- strides and lengths ----------------------------------------------------------------------------------------------


def test_strides_that_contradict_the_default_are_warned_of_and_refused_in_strict_mode() -> None:
    # Rate limited by operation and tensor, so that each is asked for once, in a process of its own.
    code = """
import warnings, torch, layerzero as lz
x = torch.randn(2, 6, 32).view(2, 6, 4, 8)
t = x.transpose(1, 2)
def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "transposed" in str(w.message)]
assert said(lambda: lz.attention(x, x, x)) == []
assert said(lambda: lz.attention(t, t, t, layout="BHSD")) == []
assert said(lambda: lz.attention(t, t, t, layout="BSHD")) == []
fused = torch.randn(2, 6, 3, 4, 8).unbind(2)
assert said(lambda: lz.attention(*fused)) == []
with lz.layout("BHSD"):
    assert said(lambda: lz.attention(t, t, t)) == []
(one,) = said(lambda: lz.attention(x.transpose(1, 2).contiguous(), t, t))
assert "'key'" in one and "layout='BHSD'" in one and "BSHD" in one, one
assert said(lambda: lz.attention(t.contiguous(), t, t)) == [], "once a minute"
cos = torch.rand(16, 4)
(one,) = said(lambda: lz.rope(t, cos, cos))
assert "'input'" in one, one
lz.configure(strict_mode=True)
lz.attention(x, x, x)
lz.attention(t, t, t, layout="BSHD")
try:
    lz.attention(t, t, t)
except lz.InvalidCallError as error:
    assert error.code == "LAYOUT_CONTRADICTED" and "layout='BHSD'" in error.hint
else:
    raise AssertionError("not refused")
print("ok")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "ok", run.stderr


def test_causal_attention_with_more_queries_than_keys_suggests_the_other_layout() -> None:
    q, k = torch.randn(1, 8, 3, 4), torch.randn(1, 5, 3, 4)
    for call in (lz.attention, torch.ops.layerzero.attention):
        with pytest.raises(lz.InvalidCallError) as caught:
            call(q, k, k)
        assert caught.value.code == "CAUSAL_MORE_QUERIES" and "layout='BHSD'" in caught.value.hint
    with pytest.raises(lz.InvalidCallError, match="more queries than keys"):
        lz.explain("attention", q, k, k)
    lz.attention(q, k, k, causal=False)
    lz.cross_attention(q, k, k)
    lz.attention(q, q, q)
