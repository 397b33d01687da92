"""When LayerZero meets torch: it never imports it, and whatever the order, the operators are there.

Each test is a process of its own: what is imported cannot be undone.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import layerzero
import pytest

PACKAGE = str(Path(layerzero.__file__).parent.parent)


def python(program: str, *path: str) -> str:
    """What a program prints. It fails the test if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, PACKAGE]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stand_in(folder: Path, **sources: str) -> str:
    """A folder with modules of these sources, to be found before the real ones."""
    for name, source in sources.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    return str(folder)


HOOK = "from layerzero.integrations.import_hook import after_import\n"


def test_importing_layerzero_imports_neither_torch_nor_numpy() -> None:
    assert python("import sys, layerzero; print([m for m in ('torch', 'numpy') if m in sys.modules])") == "[]"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layerzero", "torch"),
        ("torch._dynamo", "layerzero"),
        pytest.param("torch", "layerzero", marks=pytest.mark.slow),
        pytest.param("layerzero.integrations.torch_operators.torch_ops", "torch", marks=pytest.mark.slow),
    ],
)
def test_the_order_of_imports_does_not_matter(first: str, second: str) -> None:
    program = """
        import sys
        import {first}
        import {second}
        import layerzero, torch
        x = torch.randn(2, 8)
        assert torch.equal(torch.ops.layerzero.gelu(x), layerzero.gelu(x))
        assert "torch._dynamo" not in sys.modules
        function = torch.compile(lambda x: layerzero.gelu(x), backend="eager", fullgraph=True)
        assert torch.equal(function(x), layerzero.gelu(x))
        print("fine")
    """
    order = program.format(first=first, second=second)
    if first == "torch._dynamo":
        order = order.replace('assert "torch._dynamo" not in sys.modules', "")
    assert python(order) == "fine"


def test_the_hook_leaves_no_trace_on_the_module() -> None:
    program = """
        import importlib.machinery, importlib.util, inspect, sys
        before = importlib.util.find_spec("torch")
        import layerzero
        during = importlib.util.find_spec("torch")
        assert during.origin == before.origin and during.loader.get_filename("torch") == before.origin
        assert "torch" not in sys.modules
        import torch
        assert type(torch.__loader__) is type(torch.__spec__.loader) is importlib.machinery.SourceFileLoader
        assert "Tensor" in inspect.getsource(torch)
        import torch._dynamo
        # With nothing left to wait for, nothing waits.
        assert not any(type(finder).__module__.startswith("layerzero") for finder in sys.meta_path)
        print("fine")
    """
    assert python(program) == "fine"


def test_callbacks_run_once_after_the_module_is_whole(tmp_path: Path) -> None:
    path = stand_in(tmp_path, late="first = 1\nlast = 2\n")
    program = """
        import importlib, sys
        said = []
        after_import("late", lambda: said.append(sys.modules["late"].last))
        assert said == []
        import late
        assert said == [2]
        importlib.reload(late)
        assert said == [2]
        after_import("late", lambda: said.append("at once"))
        assert said == [2, "at once"]
        print("fine")
    """
    assert python(HOOK + textwrap.dedent(program), path) == "fine"


def test_a_module_that_fails_to_import_is_waited_for_again(tmp_path: Path) -> None:
    path = stand_in(tmp_path, late="import os\nif 'LATE' not in os.environ:\n    raise OSError('not yet')\n")
    program = """
        import os
        said = []
        after_import("late", lambda: said.append("late"))
        try:
            import late
        except OSError as error:
            assert str(error) == "not yet" and said == []
        else:
            raise AssertionError("imported")
        os.environ["LATE"] = "1"
        import late
        assert said == ["late"]
        print("fine")
    """
    assert python(HOOK + textwrap.dedent(program), path) == "fine"


def test_a_module_that_is_not_there_stays_not_there() -> None:
    program = """
        import importlib.util
        after_import("no_such_module", lambda: None)
        assert importlib.util.find_spec("no_such_module") is None
        try:
            import no_such_module
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert python(HOOK + textwrap.dedent(program)) == "no_such_module"


def test_looking_for_a_module_imports_nothing(tmp_path: Path) -> None:
    path = stand_in(tmp_path, package____init__="", package__late="print('imported')\n")
    program = """
        import copy, importlib.util
        after_import("package.late", lambda: print("told"))
        spec = importlib.util.find_spec("package.late")
        copy.copy(spec.loader)
        print(spec.loader.is_package("package.late"))
    """
    assert python(HOOK + textwrap.dedent(program), path) == "False"


def test_a_callback_that_fails_does_not_fail_the_import(tmp_path: Path) -> None:
    path = stand_in(tmp_path, late="value = 3\n")
    program = """
        import warnings
        after_import("late", lambda: 1 / 0)
        after_import("late", lambda: print("the next one runs"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import late
        print(late.value, caught[0].message)
    """
    told = "the next one runs\n3 LayerZero could not set itself up for late: ZeroDivisionError: division by zero"
    assert python(HOOK + textwrap.dedent(program), path) == told


def test_many_threads_at_once(tmp_path: Path) -> None:
    path = stand_in(tmp_path, late="import time\ntime.sleep(0.2)\nlast = 1\n")
    program = """
        import sys, threading
        said = []
        start = threading.Barrier(8)

        def work(i):
            start.wait()
            if i % 2:
                import late
                assert late.last == 1
            else:
                after_import("late", lambda i=i: said.append((i, sys.modules["late"].last)))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert sorted(said) == [(i, 1) for i in (0, 2, 4, 6)], said
        print("fine")
    """
    for _ in range(3):
        assert python(HOOK + textwrap.dedent(program), path) == "fine"


def test_another_hook_that_asks_every_finder(tmp_path: Path) -> None:
    path = stand_in(tmp_path, late="")
    program = """
        import sys

        class Nosy:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if name != "late" or self.busy:
                    return None
                self.busy = True
                try:
                    found = [finder.find_spec(name, path, target) for finder in sys.meta_path]
                    return next(spec for spec in found if spec is not None)
                finally:
                    self.busy = False

        said = []
        after_import("late", lambda: said.append(1))
        sys.meta_path.insert(0, Nosy())
        import late
        print(said)
    """
    assert python(HOOK + textwrap.dedent(program), path) == "[1]"


def test_torch_is_met_by_any_thread() -> None:
    program = """
        import threading, layerzero
        threads = [threading.Thread(target=__import__, args=("torch",)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import torch
        print(torch.ops.layerzero.gelu.default._schema.name)
    """
    assert python(program) == "layerzero::gelu"
