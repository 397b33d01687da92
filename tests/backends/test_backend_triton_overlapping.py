"""Launches that begin before the one before has ended: which ones do, and that each waits before it touches memory.

Kernels are compiled for a Hopper GPU, which takes none, and the code is read; that they give what they should on one is
shown by `tests/gpu`.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.compiler")

WAITS, GOES_ON = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
TOUCHES = re.compile(r"\b(ld|st|atom|red)\.(\w+\.)*global|cp\.async")
DEVICE = torch.device("cuda:0")
POINTERS = {"logits_ptr": "*fp32", "uniform_ptr": "*fp32", "work_ptr": "*fp64", "output_ptr": "*i64", "y_ptr": "*bf16",
            "parts_ptr": "*fp32"}  # fmt: skip


class Recorded:
    """A launch that was made and not run."""

    def __init__(self, kernel: Any, grid: int, device: torch.device, scalars: tuple[Any, ...] = (),
                 constants: tuple[Any, ...] = (), warps: int = 4, stages: int = 2, overlaps: bool = False) -> None:  # fmt: skip
        self.kernel, self.constants, self.warps, self.overlaps = kernel, constants, warps, overlaps

    def ptx(self) -> str:
        """What a Hopper GPU would run."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = list(self.kernel.arg_names)
        constants = dict(zip(names[-len(self.constants) :], self.constants, strict=True))
        types = {name: "i64" if name in ("wanted", "seed") else POINTERS.get(name, "i32") for name in names}
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = ASTSource(self.kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        options = {"num_warps": self.warps, "launch_pdl": self.overlaps}
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made as for an H200."""
    launching = import_module("layerzero.backends.triton.launching")
    if launching.INTERPRETED:
        pytest.skip("kernels are not compiled where they are interpreted")
    for name in ("sampling.sampling", "decoding.splitting"):
        module = import_module(f"layerzero.backends.triton.{name}")
        monkeypatch.setattr(module, "Launch", Recorded)
        monkeypatch.setattr(module, "overlaps", lambda device: True)
        monkeypatch.setattr(module, "processors", lambda device: 132)
    yield


def sampling(rows: int) -> Any:
    """The launches that draw from so many rows."""
    module = import_module("layerzero.backends.triton.sampling.sampling")
    kinds = (torch.float32, DEVICE, True, (torch.float32, 1, 0), False, False)
    return module._plan.__wrapped__(torch.Size((rows, 128256)), (128256, 1), *kinds)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("rows", "overlap"), [(1, True), (2, True), (3, False), (64, False)])
def test_few_rows_are_drawn_by_launches_that_overlap(rows: int, overlap: bool) -> None:
    """The first waits for whatever came before, as any launch does; each kernel is told which it is."""
    _, *launches = sampling(rows)
    assert [launch.overlaps for launch in launches] == [False, overlap, overlap, overlap]
    assert [launch.constants[-1] for launch in launches] == [overlap] * 4


@pytest.mark.usefixtures("on_hopper")
def test_what_overlaps_waits_before_it_touches_memory() -> None:
    _, *launches = sampling(1)
    for number, launch in enumerate(launches):
        code = launch.ptx()
        touched = TOUCHES.search(code)
        assert touched, "a kernel that touches no memory shows nothing"
        waited, went_on = code.find(WAITS), code.find(GOES_ON)
        assert (0 < waited < touched.start()) if number else waited < 0, launch.kernel
        # Not before its own wait: the third would begin when the first has not ended.
        assert went_on > waited if number < 3 else went_on < 0, launch.kernel


@pytest.mark.usefixtures("on_hopper")
def test_the_join_of_parts_waits_for_them() -> None:
    splitting = import_module("layerzero.backends.triton.decoding.splitting")
    query = torch.empty(2, 8, 128, dtype=torch.bfloat16, device="meta")
    joins = [cell.cell_contents for cell in splitting.attention(None, query, 128, 4).__closure__]
    (join,) = [one for one in joins if isinstance(one, Recorded)]
    code = join.ptx()
    touched = TOUCHES.search(code)
    assert join.overlaps and touched and 0 < code.find(WAITS) < touched.start()


@pytest.mark.usefixtures("on_hopper")
def test_without_overlap_nothing_waits() -> None:
    _, *launches = sampling(64)
    for launch in launches[:2]:
        code = launch.ptx()
        assert WAITS not in code and GOES_ON not in code


@pytest.mark.parametrize("overlap", [False, True])
def test_triton_is_told_which_launches_overlap(overlap: bool) -> None:
    launching, told = import_module("layerzero.backends.triton.launching"), dict[str, Any]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: told.update(options)

    launching.Launch(Kernel(), 1, torch.device("cpu"), overlaps=overlap)()
    assert told.get("launch_pdl", False) is overlap


@pytest.mark.parametrize(
    ("device", "capability", "known", "expected"),
    [
        ("cuda:0", (9, 0), True, True),
        ("cuda:0", (10, 0), True, True),
        ("cuda:0", (8, 0), True, False),
        ("cuda:0", (12, 0), True, False),
        ("cuda:0", (9, 0), False, False),
        ("cpu", (9, 0), True, False),
    ],
)
def test_where_launches_overlap(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], known: bool, expected: bool
) -> None:
    overlapping = import_module("layerzero.backends.triton.overlapping")
    monkeypatch.setattr(overlapping, "KNOWN", known)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert overlapping._can_overlap.__wrapped__(torch.device(device)) is expected


@pytest.mark.gpu
def test_draws_of_one_row_are_right_in_a_graph_and_one_after_another() -> None:
    """Against a sort in float64, for other numbers at every replay."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    topp = import_module("layerzero.backends.triton.sampling.sampling").topp
    rows, vocab = 1, 128256

    def drawn(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        values, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
        weights = torch.softmax(values, -1)
        kept = torch.where(weights.cumsum(-1) - weights < 0.9, weights, 0.0)
        sums = kept.cumsum(-1)
        place = (sums <= uniform.double()[:, None] * sums[:, -1:]).sum(-1, keepdim=True)
        return ids.gather(-1, torch.minimum(place, (kept > 0).sum(-1, keepdim=True) - 1))[:, 0]

    def numbers(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, vocab, device="cuda") * scale, torch.rand(rows, device="cuda")

    torch.manual_seed(0)
    calls = [numbers(0.5 + number % 4) for number in range(40)]
    outputs = [topp(*call, 0.9, 0) for call in calls]
    for call, output in zip(calls, outputs, strict=True):
        assert torch.equal(output, drawn(*call))
    logits, uniform = numbers(1.0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        captured = topp(logits, uniform, 0.9, 0)
    for call in calls:
        logits.copy_(call[0])
        uniform.copy_(call[1])
        graph.replay()
        assert torch.equal(captured, drawn(*call))
