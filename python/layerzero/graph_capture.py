"""``with lz.capture():`` makes the calls of a block ready for a CUDA graph that is captured after it.

A ``with`` block runs once, so that nothing here records a graph: the block runs as it is, on the stream a graph will be
captured on, and every kind of call made in it is noted. When it ends, the kernel that a capture would choose for each call
is compiled, proven where ``graph_strict_mode`` asks for that, and run a few times on that stream; and the choice is held.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from layerzero import _native, control, devices, graphs, loading, warm_up
from layerzero.errors import InvalidCallError
from layerzero.results import Result, Rows, Table, rows


@dataclass(frozen=True, slots=True, repr=False)
class RecordedCall(Result):
    """A kind of call that was made in a recording."""

    call: dict[str, Any]
    """The call, as :func:`layerzero.manifest` writes it."""
    device: str
    """Its device."""
    kernel: str | None
    """The kernel that is held for captures; ``None`` on a device without graphs."""
    error: str | None
    """Why the kernel could not be run once more at the end; the call itself was made."""


class Recording(Result):
    """What ``with lz.capture() as recording`` gives. It fills when the block ends."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []

    @property
    def calls(self) -> Rows[RecordedCall]:
        """The kinds of calls made inside, in the order of their first call."""
        return rows(self._calls, "calls")

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {"schema_version": "1.0", **self.calls.to_dict()}

    def _table(self) -> Table:
        lines = [f"{one.call['op']} on {one.device}: {one.kernel or 'not captured there'}" for one in self.calls]
        return Table(f"{len(lines)} kinds of calls", (), (), lines)


def release() -> None:
    """Forgets the kernels that :class:`capture` has fixed: the next capture selects again."""
    _native.graph_release()


class Noting:
    """Takes note of the kinds of calls that are made between its begin and its end."""

    def begin(self) -> None:
        """Calls are noted from here on."""
        self._plan = _native.recording()
        self._around = control.frames()
        self._frame = control.Frame({}, self._plan, control.overlay({}, self._plan, self._around))
        control.stand_in((self._frame, *self._around))

    def end(self) -> None:
        """Up to here."""
        control.leave(self._frame, self._around)

    def calls(self) -> list[tuple[str, int]]:
        """The kinds of calls since this was asked last: as JSON, with the numbers of their devices."""
        return self._plan.noted()


class capture:
    """Makes the calls of a block ready for a CUDA graph::

        with lz.capture():
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)

    The block runs once, eagerly, on ``stream``: by default the one that ``torch.cuda.graph`` captures on when it is not
    given another. When the block ends, the kernel that a capture would choose for each call is compiled and run
    ``graph.warmup_iterations`` times on that stream, on made-up inputs of the same sizes. So cuBLAS, cuDNN and the
    kernel's own library have allocated what they keep. With ``graph_strict_mode`` the kernel is proven first. Captures use
    it for calls of exactly these sizes, until :func:`layerzero.release_captures` or :func:`layerzero.release_pins`. At the
    end the stream that was current waits for ``stream``.

    Raises:
        CudaGraphUnsafeError: no kernel may be captured for one of the calls.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    def __enter__(self) -> Recording:
        loading.load()
        self._recording = Recording()
        self._streams = ExitStack()
        self._enter_stream()
        self._noting = Noting()
        self._noting.begin()
        return self._recording

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noting.end()
        with self._streams:
            if raised is None:
                for call, device in self._noting.calls():
                    self._recording._calls.append(ready(call, device, self._stream))

    def _enter_stream(self) -> None:
        """Goes over to the side stream, where there is one."""
        import torch

        if not torch.cuda.is_available():
            return
        if torch.cuda.is_current_stream_capturing():
            raise InvalidCallError(
                "a CUDA graph is being captured already",
                code="ALREADY_CAPTURING",
                hint="use lz.capture before torch.cuda.graph, not inside of it",
            )
        self._stream = self._stream if self._stream is not None else _default_stream()
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        self._streams.callback(before.wait_stream, self._stream)
        self._streams.enter_context(torch.cuda.stream(self._stream))


def _default_stream() -> Any:
    """The stream that ``torch.cuda.graph`` captures on by default, if it is one of the current device."""
    import torch

    known = torch.cuda.graph.default_capture_stream
    if known is None:
        known = torch.cuda.graph.default_capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    if known.device.index == torch.cuda.current_device():
        return known
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def ready(call: str, device: int, stream: Any) -> RecordedCall:
    """Makes the kernel of a call ready for a capture, and holds it."""
    told, name = json.loads(call), _native.device_name(device)
    if not graphs.captures(device):
        return RecordedCall(told, name, None, None)
    warm_up.compile_for_capture(call, device)
    if graphs.limits().strict:
        for _ in graphs.prove_wanted(call, device):
            pass
    kernel = _native.graph_hold(call, device)
    error = None
    try:
        graphs.warm(kernel, call, device, side(device, stream))
    except Exception as raised:  # noqa: BLE001 - the call itself was made; there may be no memory for another
        error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
    return RecordedCall(told, name, kernel, error)


def side(device: int, stream: Any) -> graphs.Graphs:
    """What warms up on a stream of a device."""
    index = devices.cuda_index(device) or 0
    # A stream of another device is of no use here.
    same = stream is not None and stream.device.index == index
    return graphs.CudaGraphs(index, stream if same else None)
