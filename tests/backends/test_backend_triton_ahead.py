"""Our Triton kernels, compiled by another process, without a device: under the very keys that launches look for."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from layerzero.backends.triton import adapter
from processes import answer

pytest.importorskip("triton")
pytest.importorskip("triton.compiler")

HOPPER = (9, 0)


def norm() -> Any:
    x, w = torch.ones(4, 512, dtype=torch.bfloat16), torch.ones(512)
    return import_module("layerzero.backends.triton.norm").rms_norm(x, w, 1e-6)


def shifted() -> Any:
    """The same, of a tensor that begins in the middle of 16 bytes, and whose rows do not fill a block."""
    x, w = torch.ones(4 * 510 + 1, dtype=torch.bfloat16)[1:].view(4, 510), torch.ones(510)
    return import_module("layerzero.backends.triton.norm").rms_norm(x, w, 1e-6)


def draw() -> Any:
    logits, uniform = torch.zeros(2, 4096), torch.zeros(2)
    return import_module("layerzero.backends.triton.sampling.sampling").topp(logits, uniform, 0.9, 0)


def pages() -> Any:
    cache = torch.zeros(8, 16, 2, 64, dtype=torch.float16)
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 33, dtype=torch.int32)
    decode = import_module("layerzero.backends.triton.decoding.paged").decode
    return decode(torch.ones(2, 4, 64, dtype=torch.float16), cache, cache, tables, lens, None, 7, 30.0, "NHD")


def dense() -> Any:
    q, k = (torch.ones(1, 64, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    attention = import_module("layerzero.backends.triton.attention").attention
    return attention(q, k, k, None, True, None, -1, -1, 50.0, "BSHD")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and Triton aimed at a Hopper GPU."""
    launching, ahead = (import_module(f"layerzero.backends.triton.{name}") for name in ("launching", "ahead"))
    if launching.INTERPRETED:
        pytest.skip("kernels are not compiled where they are interpreted")
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", ahead._Target(90))
    forget_keys()
    yield tmp_path


def forget_keys() -> None:
    """As in a fresh process: other tests of this one may have had keys made that are not settled."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("layerzero.backends.triton")]
    for function in [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]:
        function.hash = None
        function.used_global_vals.clear()


def entries(cache: Path) -> set[str]:
    """The keys of what is in the cache."""
    return {path.parent.name for path in cache.glob("*/*.cubin")}


def looked_for(noted: list[Any], cache: Path) -> set[str]:
    """What Triton had to compile for these launches, with their own tensors, since it did not find it."""
    before = entries(cache)
    for kernel, arguments, options in noted:
        kernel.device_caches.clear()
        kernel.warmup(*arguments, grid=(1,), **options)
        kernel.device_caches.clear()
    return entries(cache) - before


def noted(run: Callable[[], Any]) -> list[Any]:
    launching = import_module("layerzero.backends.triton.launching")
    with launching.noting() as launches:
        run()
    assert launches
    return list(launches)


def test_another_process_compiles_what_launches_look_for(cache: Path) -> None:
    """And nothing else would do: for a tensor of another alignment, Triton compiles anew."""
    ahead = import_module("layerzero.backends.triton.ahead")
    launches = [launch for run in (norm, draw, pages, dense) for launch in noted(run)]
    needed = json.loads(json.dumps(ahead.merged(ahead.written(noted, HOPPER) for noted in ([launches[0]], launches))))
    assert len(needed["launches"]) == len(launches), "each once"
    told = answer(
        f"""
    import json
    from layerzero import compile_worker
    import torch
    needed = json.loads({json.dumps(needed)!r})
    told = compile_worker._answer(dict(id=1, kernel="a", ahead=["layerzero.backends.triton.ahead", needed]))
    answer([told, torch.cuda.is_initialized()])
    """
    )
    assert told[0].get("error") is None and told[1] is False, told
    assert len(entries(cache)) == len({(l.kernel.__name__, str(l.options), str(l.arguments)) for l in launches})
    assert looked_for(launches, cache) == set()
    assert len(looked_for(noted(shifted), cache)) == 1


def test_keys_do_not_depend_on_what_was_compiled_before() -> None:
    """In Triton 3.6 they do: `put_aside` has another one after `narrow`, which calls some of the same functions."""
    launching = import_module("layerzero.backends.triton.launching")
    if launching.INTERPRETED:
        pytest.skip("kernels are not compiled where they are interpreted")
    modules = [import_module(f"layerzero.backends.triton.{name}") for name in ("numerals", "overlapping")]
    modules += [import_module(f"layerzero.backends.triton.sampling.{name}") for name in ("drawing", "narrowing")]
    functions = {id(f): f for module in modules for f in vars(module).values() if hasattr(f, "used_global_vals")}
    found = []
    for order in (
        ("put_aside", "narrow", "survey"),
        ("survey", "narrow", "put_aside"),
        ("narrow", "put_aside", "survey"),
    ):
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
        kernels = {name: getattr(modules[-1], name) for name in order}
        for kernel in kernels.values():
            launching.settle_key(kernel)
        found.append({name: kernel.cache_key for name, kernel in kernels.items()})
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_written_down_is_not_sent() -> None:
    ahead, launching = (import_module(f"layerzero.backends.triton.{name}") for name in ("ahead", "launching"))
    kernel = import_module("layerzero.backends.triton.norm")._rms
    assert ahead.written([launching.Noted(kernel, (torch.float32,), {})], HOPPER) is None
    [launch] = ahead.written([launching.Noted(kernel, (True, None, 3, 0.5), {"num_warps": 4})], HOPPER)["launches"]
    assert launch["arguments"] == [True, None, 3, 0.5] and launch["options"] == {"num_warps": 4}
    assert ahead.merged([{"arch": 90, "launches": [launch]}, {"arch": 80, "launches": [launch]}]) is None


def test_only_the_thread_that_notes_does_not_launch() -> None:
    from threading import Thread

    launching = import_module("layerzero.backends.triton.launching")
    made: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: made.append(arguments)

    launch = launching.Launch(Kernel(), 1, torch.device("cpu"))
    with launching.noting() as launches:
        launch(1)
        other = Thread(target=launch, args=(2,))
        other.start()
        other.join()
    launch(3)
    assert [noted.arguments for noted in launches] == [(1,)] and made == [(2,), (3,)]


def test_the_adapter_knows_its_kernels_without_importing_them() -> None:
    told = answer(
        """
    import sys
    import torch
    from layerzero.backends.triton import adapter
    answer([name for name in sys.modules if name.split(".")[0] == "triton" or "backends.triton." in name])
    """
    )
    assert sorted(told) == ["layerzero.backends.triton.adapter"]
    real: dict[str, Any] = {}
    for module in {module for module, _ in adapter.PLACES.values()}:
        real |= import_module(f"layerzero.backends.triton.{module}").KERNELS
    assert real.keys() == adapter.KERNELS.keys()
    for kernel, function in real.items():
        assert list(inspect.signature(function).parameters) == list(adapter.PLACES[kernel][1]), kernel
        assert list(inspect.signature(adapter.KERNELS[kernel]).parameters) == list(adapter.PLACES[kernel][1])
