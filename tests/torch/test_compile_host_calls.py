"""Calls that stay torch's: made once in a run, also by several threads, and right."""

from __future__ import annotations

import threading
from typing import Any

import layerzero as lz
import pytest
import torch
from torch import Tensor, nn


@torch.library.custom_op("layerzero_tests::three", mutates_args=())
def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three results; the last two would differ if the call were made for each."""
    COUNTED.append(1)
    drawn = torch.rand_like(x)
    return x * 2, drawn, drawn + 1


@three.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)


COUNTED: list[int] = []


class Three(nn.Module):
    """Reads some of the results."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Any:
        """The results, with work between them."""
        a, b, c = three(x + 1)
        return [torch.tanh(a), c - b, b][: self.reads]


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_call_is_made_once_in_a_run(reads: int) -> None:
    x = torch.randn(4, 5)
    compiled = lz.compile(Three(reads).eval(), x)
    for _ in range(3):
        COUNTED.clear()
        found = compiled(x)
        assert len(COUNTED) == 1
        torch.testing.assert_close(found[0], torch.tanh(2 * (x + 1)))
        if reads > 1:
            # Of one draw: else the difference is no 1.
            torch.testing.assert_close(found[1], torch.ones(4, 5))


def test_a_profile_makes_it_once_a_round() -> None:
    x = torch.randn(4, 5)
    compiled = lz.compile(Three(3).eval(), x)
    compiled(x)
    COUNTED.clear()
    compiled.profile(rounds=5)
    assert 5 <= len(COUNTED) <= 7


def test_the_interpreter_makes_it_once() -> None:
    from exported_graphs import export, run

    x = torch.randn(4, 5)
    exported = export(Three(3).eval(), (x,))
    COUNTED.clear()
    found, _ = run(exported, (x,))
    assert len(COUNTED) == 1
    torch.testing.assert_close(found[1], torch.ones(4, 5))


def test_several_callers_at_once_get_their_own_results() -> None:
    class Sorting(nn.Module):
        def forward(self, x: Tensor) -> Any:
            values, places = torch.sort(x * 3, dim=-1, stable=True)
            top, where = values.topk(2, -1)
            return values, places, top, where

    model = Sorting().eval()
    compiled = lz.compile(model, torch.randn(6, 40))
    inputs = [torch.randn(6, 40) for _ in range(4)]
    expected = [model(x) for x in inputs]
    wrong: list[str] = []

    def work(at: int) -> None:
        try:
            for _ in range(40):
                for one, other in zip(compiled(inputs[at]), expected[at], strict=True):
                    if not torch.equal(one, other):
                        wrong.append(f"caller {at}")
        except Exception as error:  # noqa: BLE001 - told by the thread that started this one
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


def test_an_error_in_a_call_is_the_callers_and_the_next_call_works() -> None:
    @torch.library.custom_op("layerzero_tests::picky", mutates_args=())
    def picky(x: Tensor) -> tuple[Tensor, Tensor]:
        if bool((x < 0).any()):
            raise ValueError("no negative numbers")
        return x.sqrt(), x + 1

    @picky.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return picky(x * 1.0)

    compiled = lz.compile(Picky().eval(), torch.ones(3))
    with pytest.raises(ValueError, match="no negative numbers"):
        compiled(-torch.ones(3))
    root, more = compiled(4 * torch.ones(3))
    assert root.tolist() == [2, 2, 2]
    assert more.tolist() == [5, 5, 5]
