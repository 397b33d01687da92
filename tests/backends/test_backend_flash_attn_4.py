"""FlashAttention 4 without its Python: which calls go past it, with a library that keeps compiled functions as it does."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from layerzero.backends._shared.flash_attn_4.launching import Launch
from torch import Tensor, nn


class AuxData(NamedTuple):
    """As `flash_attn.cute.utils.AuxData`."""

    tensors: Any = None
    scalars: Any = None


class JITCache:
    """As `flash_attn.cute.cache_utils.JITCache`."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __setitem__(self, key: Any, compiled: Any) -> None:
        self.cache[key] = compiled

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.cache


class Library:
    """`flash_attn_func` down to its compiled function, which here is torch's attention."""

    def __init__(self) -> None:
        self.python_calls = 0
        self.launches = 0
        self.rest: Callable[[Tensor], tuple[Any, ...]] = lambda query: (None, None, AuxData(None, None))
        self.launches_per_call = 1
        self.between: Callable[[], None] = lambda: None

        def _flash_attn_fwd(query: Tensor, key: Tensor, value: Tensor, softmax_scale: Any, causal: bool) -> Tensor:
            compile_key = (query.dtype, causal, query.shape[-1])
            if compile_key not in _flash_attn_fwd.compile_cache:  # type: ignore[attr-defined]
                _flash_attn_fwd.compile_cache[compile_key] = self.compiled(causal)  # type: ignore[attr-defined]
            self.between()
            output = torch.empty(query.shape, dtype=query.dtype)
            scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            for _ in range(self.launches_per_call):
                # Sums are kept where gradients may be wanted.
                lse = torch.empty(1) if query.requires_grad or key.requires_grad or value.requires_grad else None
                _flash_attn_fwd.compile_cache[compile_key](  # type: ignore[attr-defined]
                    query.detach(), key.detach(), value.detach(), output.detach(), scale, lse, *self.rest(query)
                )
            return output

        _flash_attn_fwd.compile_cache = JITCache()  # type: ignore[attr-defined]
        self.forward = _flash_attn_fwd

    def compiled(self, causal: bool) -> Callable[..., None]:
        """What a key compiles to."""

        def launch(query: Tensor, key: Tensor, value: Tensor, output: Tensor, scale: float, *rest: Any) -> None:
            assert not (query.requires_grad or key.requires_grad or value.requires_grad)
            assert not rest or isinstance(rest[-1], AuxData | Tensor)
            self.launches += 1
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            done = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
            output.copy_(done.transpose(1, 2))

        return launch

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False
    ) -> tuple[Tensor, None]:
        """The front door."""
        self.python_calls += 1
        return self.forward(q, k, v, softmax_scale, causal), None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Installed in the place of the real one."""
    made = Library()
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = made.forward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    yield made


def operands(heads_first: bool, seed: int = 0) -> list[Tensor]:
    """Query, key and value of grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 5, heads, 16, generator=generator) for heads in (4, 2, 2)]
    return [t.transpose(1, 2).contiguous() if heads_first else t for t in made]


def wanted(tensors: list[Tensor], heads_first: bool, scale: float | None = None) -> Tensor:
    """Attention in float64."""
    q, k, v = (t.double() if heads_first else t.double().transpose(1, 2) for t in tensors)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = q @ k.mT * (16**-0.5 if scale is None else scale)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    output = scores.softmax(-1) @ v
    return output if heads_first else output.transpose(1, 2)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_later_calls_go_past_the_librarys_python(library: Library, heads_first: bool, scale: float | None) -> None:
    launch = Launch(library.flash_attn_func, heads_first, {"softmax_scale": scale, "causal": True})
    for seed in range(4):
        tensors = operands(heads_first, seed)
        output = launch(*tensors)
        torch.testing.assert_close(output.double(), wanted(tensors, heads_first, scale), rtol=1e-5, atol=1e-5)
    assert (library.python_calls, library.launches) == (1, 4)
    assert isinstance(library.forward.compile_cache, JITCache)  # type: ignore[attr-defined]


def test_a_result_is_the_callers_own(library: Library) -> None:
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    first, second = operands(False, 1), operands(False, 2)
    outputs = [launch(*first), launch(*first), launch(*second)]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[1].double(), wanted(first, False), rtol=1e-5, atol=1e-5)
    assert len({output.data_ptr() for output in outputs}) == 3


def test_parameters_are_taken_without_their_gradient(library: Library) -> None:
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    tensors = [t.requires_grad_() for t in operands(False)]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(launch(*tensors).double(), wanted(tensors, False).detach(), rtol=1e-5, atol=1e-5)
    assert library.python_calls == 1


def a_tensor_more(library: Library) -> None:
    """A scheduler's counter, made anew for every call."""
    library.rest = lambda query: (torch.zeros(1),)


def a_tensor_within(library: Library) -> None:
    """The same, where it is hard to see."""
    library.rest = lambda query: (None, AuxData([torch.zeros(1)], None))


def a_launch_more(library: Library) -> None:
    """Parts that are joined by a second kernel."""
    library.launches_per_call = 2


@pytest.mark.parametrize("change", [a_tensor_more, a_tensor_within, a_launch_more])
def test_what_is_not_a_single_launch_stays_the_librarys(library: Library, change: Callable[[Library], None]) -> None:
    change(library)
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    for seed in range(3):
        tensors = operands(False, seed)
        torch.testing.assert_close(launch(*tensors).double(), wanted(tensors, False), rtol=1e-5, atol=1e-5)
    assert library.python_calls == 3


def test_without_its_cache_the_library_is_called(library: Library) -> None:
    del sys.modules["flash_attn.cute.interface"]
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    for _ in range(3):
        launch(*operands(False))
    assert library.python_calls == 3


def test_launches_of_other_threads_are_not_taken_for_ones_own(library: Library) -> None:
    others = operands(False, 9)

    def meanwhile() -> None:
        library.between = lambda: None
        thread = threading.Thread(target=lambda: library.flash_attn_func(*others, causal=True))
        thread.start()
        thread.join()

    library.between = meanwhile
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    launch(*operands(False, 1))
    tensors = operands(False, 2)
    torch.testing.assert_close(launch(*tensors).double(), wanted(tensors, False), rtol=1e-5, atol=1e-5)
    assert library.python_calls == 2 and library.launches == 3


def test_a_call_that_fails_leaves_the_library_as_it_was(library: Library) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    library.between = fail
    launch = Launch(library.flash_attn_func, False, {"causal": True})
    with pytest.raises(RuntimeError, match="out of memory"):
        launch(*operands(False))
    assert isinstance(library.forward.compile_cache, JITCache)  # type: ignore[attr-defined]
    library.between = lambda: None
    launch(*operands(False))
    launch(*operands(False))
    assert library.python_calls == 2
