"""A program that passes hostile objects to every public function, until one of them brings the process down.

    python tests/support/hostile.py SEED COUNT FILE

FILE holds the number and the function of the case under way, so that whoever started the program can say which one ended
it. Exceptions are what a hostile object deserves; a panic of the native side is reported as a mistake of ours.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import inspect
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import layerzero as lz
import torch
from torch import Tensor
from torch_cases import CASES

#: After so many seconds a case hangs.
PATIENCE = 120
#: Public names that end in no call: exceptions and answers.
FUNCTIONS = sorted(
    name for name in lz.__all__ if callable(getattr(lz, name)) and not isinstance(getattr(lz, name), type)
)
#: Calls of these without arguments measure or compile for minutes.
NEVER_EMPTY = {"tune", "regret", "warmup", "workload"}
WORDS = [
    *("attention", "rms_norm", "norm.rms", "torch.sdpa", "torch", "lz_cpu.ref.norm.rms", "cpu", "cuda:7", "float32"),
    *("BSHD", "", "\0", "\ud800", "*", "a" * 100_000, "@", "é", "../../x", "{", "[", '{"op": 1}', "1" * 5000),
]


class Boom(Exception):
    """What hostile objects raise."""


def boom(*_: Any, **__: Any) -> Any:
    raise Boom


class BaseBoom(BaseException):
    """The same, for code that catches `Exception`."""


def _class(base: type = object, **methods: Any) -> type:
    """A class with these methods; those that are no functions are given back."""
    made = {
        name: m if callable(m) or isinstance(m, property) else (lambda *_, m=m, **__: m) for name, m in methods.items()
    }
    return type("Hostile", (base,), made)


# --- kinds of objects -------------------------------------------------------------------------------------------------


def contains_itself(pick: random.Random) -> Any:
    """Lists and dicts in themselves."""
    a: list[Any] = []
    a.append(a)
    d: dict[str, Any] = {"x": 1}
    d["self"] = d
    both: list[Any] = [d]
    d["both"] = both
    both.append(both)
    queue: collections.deque[Any] = collections.deque()
    queue.append(queue)
    space = SimpleNamespace()
    space.shape = space
    return pick.choice([a, d, both, queue, (a,), {"op": d}, {"tensors": a}, space, [{"name": a}], {"rules": d}])


def nested(pick: random.Random) -> Any:
    """Deeply, or so that it is exponentially large when it is written out."""
    deep: Any = 1
    kind = pick.randrange(4)
    if kind == 3:
        # Thousands of values in fourteen lists.
        for _ in range(14):
            deep = [deep, deep]
        return deep
    # Tuples are hashed without a limit by the interpreter itself.
    for _ in range(pick.choice([33, 200] if kind == 2 else [33, 1000, 100_000])):
        deep = ([deep], {"x": deep}, (deep,))[kind]
    return deep


def huge(pick: random.Random) -> Any:
    """Numbers, texts and shapes."""
    shape = [2**62, 2**62]
    return pick.choice(
        [
            *(2**31, 2**63 - 1, -(2**63), 2**63, 2**64, 10**400, -1, float("inf"), float("nan"), -0.0, 1e308),
            *("x" * 2_000_000, b"\0" * 1_000_000, list(range(200_000)), dict.fromkeys(range(100_000)), shape),
            lz.TensorSpec((2**62, 2**62), "float32"),
            lz.TensorSpec((2**40, 8), "float32"),
            lz.TensorSpec((-1, 8), "float32"),
        ]
    )


def lying_number(pick: random.Random) -> Any:
    """`__index__` and its like that lie, raise, or never end."""
    answer = pick.choice([boom, 2**70, -(2**63), "one", None, 1.5, lambda self: self, lambda self: self.__index__()])
    return _class(__index__=answer, __int__=answer, __float__=answer, __bool__=answer, __complex__=answer)()


def lying_length(pick: random.Random) -> Any:
    """Sequences that say they are longer than memory, or shorter than nothing."""
    size = pick.choice([2**62, 2**40, -1, "x", boom])
    base = pick.choice([object, list, tuple, dict, str])
    return _class(
        base, __len__=size, __getitem__=lambda self, at: boom() if at else 1, __iter__=lambda self: iter([1, 2])
    )()


def lying_dlpack(pick: random.Random) -> Any:
    """Producers that have nothing, or something else, or say it is elsewhere."""
    real = torch.ones(4, 8)
    made = pick.choice(
        [boom, None, "x", 1, lambda self, **_: self, lambda self, **_: real.__dlpack__(), lambda self: real]
    )
    device = pick.choice([boom, (1, 0), (2, 0), (2, 99), (77, 0), (1,), None, "cpu", (2**40, -1), ("a", "b")])
    more = pick.choice(
        [
            {},
            {"shape": property(boom)},
            {"shape": property(lambda self: (4, 8))},
            {"dtype": property(lambda self: self)},
        ]
    )
    return _class(__dlpack__=made, __dlpack_device__=device, **more)()


def lying_array(pick: random.Random) -> Any:
    """Array interfaces without an array. (One that lies about an address brings numpy itself down.)"""
    interface = pick.choice(
        [boom, None, 1, {}, {"data": None}, {"shape": (2**62,), "typestr": "<f4"}, {"version": "x"}]
    )
    return _class(__array_interface__=property(lambda self: interface() if callable(interface) else interface))()


def torch_function(pick: random.Random) -> Any:
    """Objects that take torch's functions over."""
    answer = pick.choice([boom, NotImplemented, None, "x", again, lambda *a, **k: a])
    how = pick.choice([classmethod, staticmethod, lambda f: f])
    base = pick.choice([object, list, int, Tensor])
    function = answer if callable(answer) else lambda *_, **__: answer
    made = type("Hostile", (base,), {"__torch_function__": how(function)})
    return torch.ones(4, 8).as_subclass(made) if base is Tensor else made()


def again(*args: Any, **kwargs: Any) -> Any:
    """Calls what called it."""
    for value in args:
        if isinstance(value, (tuple, list)) and value:
            return lz.rms_norm(value[0])
    return lz.rms_norm(args[0])


def torch_dispatch(pick: random.Random) -> Any:
    """A tensor subclass whose operators do as they like. (One that gives more results than its operator has brings torch
    itself down.)
    """
    answer = pick.choice([boom, None, "x", lambda cls, f, types, args=(), kwargs=None: args[:1]])
    function = answer if callable(answer) else lambda *_, **__: answer
    made = type("Hostile", (Tensor,), {"__torch_dispatch__": classmethod(function)})
    if pick.random() < 0.5:
        return torch.Tensor._make_wrapper_subclass(made, (2**20, 8))
    return torch.ones(4, 8).as_subclass(made)


def lying_tensor(pick: random.Random) -> Any:
    """Tensors whose attributes are not theirs."""
    name = pick.choice(["shape", "dtype", "device", "requires_grad", "layout", "is_sparse", "data", "grad"])
    value = pick.choice([(2**62, 2**62), contains_itself(pick), "torch.float32", None, -1, lying_number(pick)])
    get = boom if pick.random() < 0.3 else (lambda self: value)
    return torch.ones(4, 8).as_subclass(type("Hostile", (Tensor,), {name: property(get)}))


def odd_tensor(pick: random.Random) -> Any:
    """Tensors of torch's own that few expect."""
    x = torch.ones(4, 8)
    made: list[Callable[[], Any]] = [
        lambda: torch.empty(1).expand(2**45),
        lambda: torch.empty(1, 1).expand(2**45, 8),
        lambda: x.to_sparse(),
        lambda: x.to(torch.complex64),
        lambda: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
        lambda: x.to("meta"),
        lambda: torch.empty(0, 8),
        lambda: torch.empty(2**40, 0),
        lambda: torch.tensor(1.0),
        lambda: x.to(torch.complex64).conj(),
        lambda: torch._neg_view(x),
        lambda: torch.nested.nested_tensor([x, x]),
        lambda: torch.nn.Parameter(x).requires_grad_(),
        lambda: torch.ones((1,) * 64),
        lambda: x.refine_names("a", "b"),
        lambda: x.as_strided((4, 8), (0, 0)),
        lambda: torch.full((4, 8), float("nan")),
        lambda: torch.full((4, 8), 2**62, dtype=torch.int64),
        lambda: torch.full((4,), -7, dtype=torch.int32),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pick.choice(made)()


def subclass(pick: random.Random) -> Any:
    """Python's own types with methods that raise or lie."""
    methods = {
        name: boom
        for name in (
            "__hash__",
            "__eq__",
            "__str__",
            "__repr__",
            "__iter__",
            "__len__",
            "__getattr__",
            "__bool__",
            "__format__",
        )
        if pick.random() < 0.4
    }
    if pick.random() < 0.3:
        methods["__class__"] = property(lambda self: pick.choice([Tensor, str, dict, int]))  # type: ignore[assignment]
    base = pick.choice([str, int, float, list, dict, tuple, bytes, object, Path().__class__])
    return _class(base, **methods)()


def everything(pick: random.Random) -> Any:
    """Objects that have every attribute, or none."""
    dead = weakref.proxy(type("Gone", (), {})())
    proxy = _class(__getattr__=lambda self, name: self, __call__=lambda self, *_, **__: self)()
    raising = _class(__getattribute__=boom)()
    raises_more = _class(__getattr__=lambda self, name: (_ for _ in ()).throw(BaseBoom()))()
    path = _class(__fspath__=pick.choice([1, boom, None, "\0", "x" * 5000]))()
    return pick.choice([MagicMock(), dead, proxy, raising, raises_more, path])


def ordinary(pick: random.Random) -> Any:
    """Objects of the wrong kind, and of the right one."""
    return pick.choice(
        [
            *(None, True, 0, 1, 1.5, (), [], {}, ..., NotImplemented, object(), int, boom, sys, b"x", 1j, range(3)),
            *(
                torch.ones(4, 8),
                torch.float32,
                torch.device("cpu"),
                torch.Size([2, 3]),
                iter([1]),
                lz.TensorSpec((4, 8), "float32"),
            ),
            *(torch.nn.Linear(8, 8), {"op": "rms_norm"}, {"a": 1}, [torch.ones(2)], Path("nowhere"), {1: 2}),
        ]
    )


def word(pick: random.Random) -> Any:
    """A text."""
    return pick.choice(WORDS)


KINDS: list[Callable[[random.Random], Any]] = [
    *(contains_itself, nested, huge, lying_number, lying_length, lying_dlpack, lying_array, torch_function),
    *(torch_dispatch, lying_tensor, odd_tensor, subclass, everything, ordinary, word),
]


def hostile(pick: random.Random) -> Any:
    """Any of them, sometimes inside of another container."""
    made = pick.choice(KINDS)(pick)
    kind = pick.randrange(8)
    return [made] if kind == 0 else {"x": made} if kind == 1 else (made, made) if kind == 2 else made


# --- calls ------------------------------------------------------------------------------------------------------------


def names_of(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function."""
    try:
        return [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return []


#: Settings, for functions that take any name.
SETTINGS = [
    "prefer_sources",
    "rules",
    "locks",
    "breaker",
    "breaker__timeout_ms",
    "rollouts",
    "strict_mode",
    "kernels",
    "x",
    "perfdb",
]


def arguments(pick: random.Random, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a function, at least one of them hostile."""
    function = getattr(lz, name)
    valid = [case for case in CASES if case.function == name]
    if valid and pick.random() < 0.6:
        given, options = pick.choice(valid).make(5)
        args, kwargs = list(given), dict(options)
        for _ in range(pick.randint(1, 3)):
            if args and pick.random() < 0.6:
                args[pick.randrange(len(args))] = hostile(pick)
            else:
                known = [*kwargs, *names_of(function)] or ["x"]
                kwargs[pick.choice(known)] = hostile(pick)
        if args:
            kwargs = {key: value for key, value in kwargs.items() if key not in names_of(function)[: len(args)]}
        return args, kwargs
    names = names_of(function)
    args = [hostile(pick) for _ in range(pick.randint(0, 4))]
    known = names[len(args) :] + (SETTINGS if name == "configure" else [])
    kwargs = {key: hostile(pick) for key in known if pick.random() < 0.5}
    if name in NEVER_EMPTY and not args and not kwargs:
        args = [hostile(pick)]
    if (
        name in ("explain", "which", "validate", "run_kernel", "register_kernel", "force_kernel")
        and args
        and pick.random() < 0.6
    ):
        args[0] = word(pick)
    return args, kwargs


def use(pick: random.Random, result: Any) -> None:
    """What one does with an answer: enter it, call it, show it."""
    if isinstance(result, contextlib.ContextDecorator):
        with result:
            lz.rms_norm(torch.ones(4, 8))
    elif callable(result) and not isinstance(result, (Tensor, type, torch.nn.Module)):
        result(hostile(pick))
    elif type(result).__module__.startswith("layerzero"):
        str(result)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """A case that hangs ends the program, and shows where."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(pick: random.Random, name: str) -> str | None:
    """One case; what went wrong with us, if anything did."""
    try:
        args, kwargs = arguments(pick, name)
        with patience():
            use(pick, getattr(lz, name)(*args, **kwargs))
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            return f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            raise
    return None


def main(seed: int, count: int, file: Path) -> int:
    """Runs the cases, and prints what went wrong."""
    wrong = []
    warnings.simplefilter("ignore")
    with open(file, "r+b", buffering=0) as under_way:
        for number in range(count):
            pick = random.Random(f"{seed}/{number}")
            name = FUNCTIONS[number % len(FUNCTIONS)]
            under_way.seek(0)
            under_way.write(f"case {number} of seed {seed}: lz.{name}".ljust(80).encode())
            error = run(pick, name)
            if error is not None:
                wrong.append(f"case {number}: lz.{name}: {error}")
            if number % 50 == 0:
                lz.reset()
                lz.release_pins()
                lz.forget_failures()
    # Whatever happened, a call is served.
    lz.reset()
    x = torch.randn(4, 8)
    served = lz.rms_norm(x)
    torch.testing.assert_close(served, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    print("\n".join(wrong))
    print(f"{count} cases of {len(FUNCTIONS)} functions, {len(wrong)} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
