"""What surrounds a call of a compiled model: autocast, traces, training mode, child processes, threads."""

from __future__ import annotations

import os
import threading

import layerzero as lz
import pytest
import torch
from compiling import layer
from layerzero.errors import LayerZeroWarning
from torch import Tensor, nn

# What surrounds a call.


def test_autocast_traces_and_derivatives_are_the_models() -> None:
    model, x = layer()
    model.requires_grad_(False)
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        with pytest.warns(LayerZeroWarning, match="ran uncompiled: autocast"), torch.autocast("cpu"):
            assert compiled(x).dtype == torch.bfloat16
        traced = torch.jit.trace(lambda x: compiled(x), (x,))
        assert torch.equal(traced(2 * x), model(2 * x))
        _, slope = torch.func.jvp(compiled, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(slope, torch.func.jvp(model, (x,), (torch.ones_like(x),))[1])
        torch.testing.assert_close(torch.func.vmap(compiled)(x), model(x))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            found = torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent
        torch.testing.assert_close(found, slope)
    torch.testing.assert_close(torch.func.grad(lambda x: compiled(x).sum())(x), model.weight.sum(0).expand(3, 6))
    left = compiled.report().model_calls
    assert {"autocast", "torch.jit.trace", "a transform of torch.func", "forward-mode derivatives"} <= left.keys()


def test_what_is_compiled_under_autocast_is_for_calls_without() -> None:
    model, x = layer()
    with torch.autocast("cpu"), torch.no_grad():
        compiled = lz.compile(model, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_flops_are_counted_as_of_the_model() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = layer()
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        with FlopCounterMode(display=False) as counter:
            compiled(x)
    assert counter.get_total_flops() == 2 * 3 * 6 * 4


def test_training_mode_is_the_models_until_it_is_over() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.9))
    compiled, x = lz.compile(model), torch.randn(3, 6)
    with torch.no_grad():
        with pytest.warns(LayerZeroWarning, match="training mode"):
            compiled(x)
        model.eval()
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x)
        model.train()
        assert (compiled(x) == 0).any()
        assert compiled.eval() is compiled
        assert not model.training
        torch.testing.assert_close(compiled(x), model(x))
    report = compiled.report()
    assert report.model_calls == {"training mode": 2}
    assert report.calls == 3


def test_tensors_that_a_graph_cannot_read_are_the_models() -> None:
    compiled, x = lz.compile(lambda x: x * 2, torch.randn(3)), torch.randn(3)
    compiled(x)
    for other in (x.to(torch.complex64), x.to("meta"), torch.eye(3).to_sparse()):
        assert compiled(other).dtype == other.dtype
    assert compiled.report().model_calls == {"other arguments": 3}


def test_the_model_runs_once_where_a_graph_cannot() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ran = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 3:
                self.ran += not isinstance(x, torch._subclasses.FakeTensor)
                return x * (2 if x.sum() > 0 else 3)
            return x * 2

    model = Stateful().eval()
    compiled = lz.compile(model, torch.ones(3))
    with pytest.warns(LayerZeroWarning, match=r"ran uncompiled: .*torch.export cannot trace"):
        assert compiled(torch.ones(5)).tolist() == [2] * 5
    assert model.ran == 1
    compiled(torch.ones(5))
    assert model.ran == 2


# Other states of the process.


def test_a_child_process_goes_on() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    with torch.no_grad():
        expected = compiled(x)
        with compiled._lock:
            child = os.fork()
            if child == 0:
                right = False
                try:
                    right = torch.equal(compiled(x), expected) and compiled(torch.randn(3, 6)).shape == (3, 4)
                finally:
                    os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_several_threads_with_other_values_and_refreshes() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    expected, wrong = model(x).detach(), []

    def work(at: int) -> None:
        try:
            with torch.no_grad():
                for n in range(30):
                    if at == 0 and n % 10 == 9:
                        compiled.refresh()
                    torch.testing.assert_close(compiled(x), expected)
        except BaseException as error:  # noqa: BLE001 - told by the thread that started this one
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []
