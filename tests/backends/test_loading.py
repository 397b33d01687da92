"""The first call loads everything. Interrupted at any point, the next call goes on; a plugin that fails leaves nothing."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerzero import _native, backend_files, loading
from layerzero.control import frames
from layerzero.tokenization import resolving
from processes import forked
from test_plugins import install

FULL = os.environ.get("LZ_TEST_SCALE") in ("full", "soak")

#: Runs a case in a child of its own, forked before anything is loaded, and gives what the child saw after its next call.
CHILDREN = """
    import json, os, signal, sys, threading, traceback, warnings, _thread
    import torch
    import layerzero as lz
    from layerzero import _native, loading

    # A shell lets what it starts in the background ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Stop(BaseException):
        pass

    X = torch.full((1, 2), 3.0)

    def state():
        kernels = sorted(json.loads(_native.list_kernels()), key=lambda k: (k["kernel_id"], k["version"]))
        perfdb = lz.health().perfdb
        return [lz.rms_norm(X).tolist(), lz.which("rms_norm", X).kernel_id, kernels, json.loads(_native.backends()),
                _native.settings(), perfdb["durable"], perfdb["known"]]

    def child(case):
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with open(writable, "w") as out:
                    json.dump(case(), out)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writable)
        with open(readable) as found:
            text = found.read()
        assert os.waitpid(pid, 0)[1] == 0, "a child failed"
        return json.loads(text)

    def call():
        warnings.simplefilter("ignore")
        return state()

    def interrupted(case):
        '''The state after a first call that `case` interrupts, and what it was interrupted by.'''
        warnings.simplefilter("ignore")
        try:
            case()
        except BaseException as raised:
            how = type(raised).__name__
        else:
            how = None
        sys.settrace(None)
        return [how, state()]
"""


def test_an_interrupt_at_any_step_is_made_up_for_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step raises, before and after its work; and Ctrl-C comes at points all over the first call."""
    # A database is opened if it is there.
    (tmp_path / "perfdb.sqlite").touch()
    monkeypatch.setenv("LAYERZERO_PERFDB_PATH", str(tmp_path / "perfdb.sqlite"))
    install(tmp_path, "fine", "fine_plugin:register", BEHAVED)
    found = forked(
        CHILDREN
        + f"""
    steps = child(lambda: (loading._all_steps() and len(loading._all_steps())))
    want = child(call)

    def at_step(at, after, error):
        def case():
            steps = loading._steps = loading._all_steps()
            real = steps[at]
            def step():
                steps[at] = real
                if after:
                    real()
                raise error
            steps[at] = step
            lz.rms_norm(X)
        return case

    everywhere = {FULL!r}
    chosen = range(steps) if everywhere else sorted({{0, 1, steps // 2, *range(steps - 4, steps)}})
    wrong = []
    for at in chosen:
        for after in (False, True):
            for error in (KeyboardInterrupt, Stop) if everywhere else ((KeyboardInterrupt, Stop)[(at + after) % 2],):
                how, seen = child(lambda: interrupted(at_step(at, after, error)))
                if how != error.__name__ or seen != want:
                    wrong.append([at, after, how])

    def events(limit):
        '''How many events there are, or Ctrl-C at one of them: as a signal, which Python acts on where it always does.'''
        count = 0
        def trace(frame, event, argument):
            nonlocal count
            if not frame.f_globals.get("__name__", "").startswith(("layerzero", "fine_plugin")):
                return None
            count += 1
            if count == limit:
                _thread.interrupt_main()
            return trace
        sys.settrace(trace)
        try:
            lz.rms_norm(X)
        finally:
            sys.settrace(None)
        return count

    most = child(lambda: events(0))
    step = 1 if everywhere else max(1, most // 15)
    interrupts = 0
    for limit in range(1, most + 1, step):
        how, seen = child(lambda: interrupted(lambda: events(limit)))
        interrupts += how == "KeyboardInterrupt"
        if seen != want:
            wrong.append([limit, how])
    answer({{"wrong": wrong, "interrupts": interrupts, "served": want[1], "durable": want[5], "kernels": len(want[2])}})
    """,
        path=[tmp_path],
    )
    assert found["wrong"] == []
    assert found["interrupts"] > 8 and found["kernels"] > 50
    assert found["served"] == "fine.norm" and found["durable"]


BEHAVED = """
def register():
    import layerzero as lz
    lz.configure(log_selections=False)
    lz.register_kernel(operation='norm.rms', kernel_id='fine.norm', platform='cpu', supported_dtypes=['float32'],
                       priority=99)(lambda input, eps: input * (input.square().mean(-1, keepdim=True) + eps).rsqrt())
    import torch
    lz.gelu(torch.ones(2))
"""


def test_warnings_that_are_errors_are_raised_once_and_everything_is_loaded(tmp_path: Path) -> None:
    install(tmp_path, "broken", "broken_plugin:register", "def register():\n    raise RuntimeError('no licence')")
    install(tmp_path, "broken_too", "broken_plugin:register", "")
    (tmp_path / "broken_plugin.py").write_text("def register():\n    raise RuntimeError('no licence')")
    found = forked(
        CHILDREN
        + """
    want = child(call)

    def case():
        warnings.simplefilter("default")
        warnings.simplefilter("error", lz.LayerZeroWarning)
        lz.rms_norm(X)

    def twice():
        how, seen = interrupted(case)
        warnings.simplefilter("error", lz.LayerZeroWarning)
        lz.rms_norm(X)
        return [how, seen]

    how, seen = child(twice)
    answer([how, seen == want])
    """,
        path=[tmp_path],
    )
    assert found == ["LayerZeroWarning", True]


def test_a_plugin_that_raises_anything_is_disabled_and_ctrl_c_is_not_its_fault(tmp_path: Path) -> None:
    code = """
    import os
    class Stop(BaseException):
        pass
    def register():
        import layerzero as lz
        lz.configure(strict_mode=True)
        lz.force_kernel("gelu", "torch.gelu")
        {raises}
    """
    install(tmp_path, "stops", "stops_plugin:register", code.format(raises="raise Stop('enough')"))
    again = "if not os.environ.pop('AGAIN', None):\n            os.environ['AGAIN'] = '1'\n            raise KeyboardInterrupt"
    install(tmp_path, "pressed", "pressed_plugin:register", code.format(raises=again))
    found = forked(
        """
        import io, os, warnings
        import torch
        import layerzero as lz
        x, seen = torch.ones(1, 2), []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                try:
                    lz.rms_norm(x)
                    seen.append("served")
                except KeyboardInterrupt:
                    seen.append("interrupted")
        backends = {b["name"]: b["unavailable"] for b in lz.doctor(file=io.StringIO()).backends}
        settings = {s.key: s.value for s in lz.settings()}
        answer([seen, [str(w.message) for w in told if "plugin" in str(w.message)], backends["stops"]["message"],
                "pressed" in backends, settings["strict_mode"], [v for k, v in settings.items() if k.startswith("locks.")]])
        """,
        path=[tmp_path],
    )
    seen, told, why, disabled, strict, lock = found
    assert seen == ["interrupted", "served", "served"] and not disabled
    assert len(told) == 1 and "Stop: enough" in told[0] and "Stop: enough" in why
    assert strict is True and lock == ["torch.gelu"], "said by the plugin that was loaded at the second attempt"


# --- a plugin that changes things and then fails ----------------------------------------------------------------------


class Entry:
    """An entry point as `importlib.metadata` gives it, of a function at hand."""

    name, value = "changes_much", "changes_much:register"

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def load(self) -> Callable[[], object]:
        return self._function


class Failed(BaseException):
    """What the plugin raises in the end."""


def _kernel(number: int) -> None:
    lz.register_kernel(
        operation="norm.rms",
        kernel_id=f"changes.norm{number}",
        platform="cpu",
        supported_dtypes=["float32"],
        priority=99,
    )(lambda input, eps: input * 2)


def _backend(number: int) -> None:
    capabilities = {
        "schema_version": "1.0",
        "backend": f"changed{number}",
        "backend_version": "1.0",
        "plugin_origin": "entry_point",
        "platform": "cpu",
        "ops": {
            "norm.rms": [
                {
                    "kernel_id": f"changed{number}.norm",
                    "priority": 99,
                    "dtypes": ["float32"],
                    "requires_layouts": ["contiguous"],
                    "dims": {name: {} for name in _native.schema("norm.rms")["must_constrain"]},
                }
            ]
        },
    }
    lz.register_backend(capabilities, {f"changed{number}.norm": lambda input, eps: input})


def _file(folder: Path, number: int) -> None:
    path = folder / f"{number}.yaml"
    path.write_text(f"memory_headroom_mb: {number}\nlocks: {{rms_norm: torch.rms_norm}}\n")
    lz.load_config(path)


def _bad_file(folder: Path, number: int) -> None:
    path = folder / f"bad{number}.yaml"
    path.write_text("nobody_knows_this: 1\n")
    try:
        lz.load_config(path)
    except lz.ConfigurationError:
        pass


def _tokenizer(number: int) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": number + 1}, unk_token="a")
    lz.register_tokenizer(f"changed{number}", tokenizers.Tokenizer(model))


#: Everything a plugin can do to the process, by name; each takes a folder and a number.
CHANGES: dict[str, Callable[[Path, int], object]] = {
    "register_kernel": lambda _, n: _kernel(n),
    "register_backend": lambda _, n: _backend(n),
    "unregister_kernel": lambda _, n: lz.unregister_kernel("torch.silu_mul"),
    "configure": lambda _, n: lz.configure(memory_headroom_mb=n, breaker={"failure_threshold": n + 1}),
    "rules": lambda _, n: lz.configure(rules=[{"avoid": "torch"}]),
    "prefer_sources": lambda _, n: lz.configure(prefer_sources=["lz_cpu"], cache={"max_size": n + 1}),
    "lock": lambda _, n: lz.force_kernel("rms_norm", "torch.rms_norm"),
    "unlock": lambda _, n: lz.unforce_kernel("rms_norm"),
    "reset": lambda _, n: lz.reset(),
    "load_config": _file,
    "bad_config": _bad_file,
    "prefer": lambda _, n: lz.prefer("torch").__enter__(),
    "register_tokenizer": lambda _, n: _tokenizer(n),
    "call": lambda _, n: lz.rms_norm(torch.ones(2, n + 1)),
    "perfdb": lambda folder, n: lz.configure(perfdb={"path": str(folder / f"{n}.sqlite")}),
}


def _now() -> dict[str, Any]:
    """Everything of it that can be seen."""
    x = torch.ones(2, 8)
    backends = [b for b in json.loads(_native.backends()) if b["name"] != Entry.name]
    return {
        "settings": json.loads(_native.settings()),
        "kernels": json.loads(_native.list_kernels()),
        "backends": backends,
        "chosen": [lz.which("rms_norm", x).kernel_id, lz.which("silu_mul", x, x).kernel_id],
        "frames": frames(),
        "tokenizers": resolving.known(),
        "reloads": lz.health().reloads,
    }


@pytest.fixture
def configured() -> Iterator[None]:
    """Something is said by code before."""
    lz.configure(memory_headroom_mb=512)
    lz.force_kernel("silu_mul", "torch.silu_mul")
    yield
    lz.reset()
    _native.load_sources()


@pytest.mark.usefixtures("configured")
@settings(max_examples=200 if FULL else 25)
@given(
    done=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3)), max_size=6),
    error=st.sampled_from([Failed, RuntimeError, KeyboardInterrupt]),
)
def test_a_plugin_that_fails_leaves_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, int]], error: type[BaseException]
) -> None:
    folder = tmp_path_factory.mktemp("plugin")

    def register() -> None:
        for name, number in done:
            try:
                CHANGES[name](folder, number)
            except lz.LayerZeroError:
                continue  # registered twice, or unregistered twice
        raise error("in the end")

    before = _now()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                loading._load_plugin(Entry(register))  # type: ignore[arg-type]
        else:
            loading._load_plugin(Entry(register))  # type: ignore[arg-type]
    assert _now() == before


def test_the_text_of_a_document_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_files, "FOLDER", tmp_path)
    file = tmp_path / "acme" / "capabilities.json"
    file.parent.mkdir()
    for moment, data in enumerate(({"ops": {"norm.rms": []}}, {"ops": {}})):
        file.write_text(json.dumps(data, indent=1))
        os.utime(file, (moment, moment))
        assert json.loads(backend_files.text("acme")) == backend_files.document("acme") == data
