"""Random torch modules, as source code: what fails can be printed, run elsewhere, and made smaller line by line.

A module is written one line at a time. Each line is run at once, on inputs of two sizes, and left out if torch refuses it, so
that the lines in `random_lines.py` may be written carelessly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

#: The sizes of batch and sequence that a module is written for, and others that it also takes.
SIZES = ((2, 5), (3, 7), (2, 1), (1, 6))
_GREATEST = 30.0


@dataclass(frozen=True)
class Input:
    """An argument of a module. Sizes are numbers or the texts ``B`` and ``S``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    layout: str = "contiguous"
    #: The greatest integer, not included.
    below: int = 7

    def made(self, batch: int, length: int, seed: int) -> Tensor:
        """A tensor for some sizes."""
        of = {"B": batch, "S": length}
        shape = [of.get(str(n), n) if isinstance(n, str) else n for n in self.shape]
        generator = torch.Generator().manual_seed(seed)
        if self.layout == "expanded" and len(shape) > 1:
            return self._numbers([1, *shape[1:]], generator).expand(shape)
        if self.layout == "transposed" and len(shape) > 1:
            return self._numbers([*shape[:-2], shape[-1], shape[-2]], generator).transpose(-1, -2)
        if self.layout == "stepped" and shape:
            return self._numbers([*shape[:-1], 2 * shape[-1]], generator)[..., ::2]
        if self.layout == "offset" and shape:
            return self._numbers([shape[0] + 1, *shape[1:]], generator)[1:]
        return self._numbers(shape, generator)

    def _numbers(self, shape: list[int], generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=generator) > 0.4
        if not self.dtype.is_floating_point:
            return torch.randint(0, self.below, shape, generator=generator).to(self.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)


@dataclass(frozen=True)
class Program:
    """The source of a module: lines of ``__init__`` and of ``forward``, and what is returned."""

    seed: int
    inputs: tuple[Input, ...]
    layers: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    #: The other batches and lengths it is called with.
    sizes: tuple[tuple[int, int], ...] = SIZES[1:]

    def source(self) -> str:
        """The module as code."""
        names = ", ".join(one.name for one in self.inputs)
        results = ", ".join(self.results) + ("," if len(self.results) == 1 else "")
        sizes = [f"{name} = {_of(self.inputs, name)}" for name in ("B", "S") if _reads(self, name)]
        body = [*sizes, *self.lines, f"return ({results})"]
        return "\n".join(
            [
                "class Module(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *[f"        {line}" for line in self.layers],
                "",
                f"    def forward(self, {names}):",
                *[f"        {line}" for line in body],
            ]
        )

    def module(self) -> nn.Module:
        """The module, in evaluation mode. Its weights depend on the seed only."""
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional}
        source = self.source()
        exec(compile(source, f"<module of seed {self.seed}>", "exec"), scope)  # noqa: S102 - a random module
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            made: nn.Module = scope["Module"]()
            for tensor in made.buffers():
                if tensor.is_floating_point() and tensor.dim() == 1:
                    nn.init.uniform_(tensor, 0.5, 1.5)
        return made.eval()

    def arguments(self, sizes: tuple[int, int], seed: int = 0) -> list[Tensor]:
        """Inputs of some sizes."""
        return [one.made(*sizes, seed=1000 * seed + 31 * at + self.seed) for at, one in enumerate(self.inputs)]

    def script(self) -> str:
        """A program that makes the module and its arguments: what a failure prints."""
        rows = [
            f"# seed {self.seed}",
            "import torch",
            "import torch.nn as nn",
            "import torch.nn.functional as F",
            "",
            "",
            self.source(),
            "",
            "",
        ]
        rows += [f"# {one.name}: {one.dtype} {list(one.shape)} {one.layout}" for one in self.inputs]
        return "\n".join(rows)


def _of(inputs: tuple[Input, ...], symbol: str) -> str:
    for one in inputs:
        if symbol in one.shape:
            return f"{one.name}.shape[{one.shape.index(symbol)}]"
    return "1"


def _reads(program: Program, name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in program.lines)


def names_in(text: str) -> set[str]:
    """The variables a line reads or writes."""
    return set(re.findall(r"\b[vx]\d+\b", text))


@dataclass
class Writer:
    """A module while it is written."""

    rng: random.Random
    inputs: list[Input] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    #: Each variable's tensors for the first two of SIZES.
    values: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    _scopes: list[dict[str, Any]] = field(default_factory=list)
    _module: nn.Module = field(default_factory=nn.Module)
    _count: int = 0

    def start(self) -> None:
        """Makes the inputs' tensors."""
        for sizes in SIZES[:2]:
            scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "self": self._module}
            scope |= {"B": sizes[0], "S": sizes[1]}
            for at, one in enumerate(self.inputs):
                scope[one.name] = one.made(*sizes, seed=at)
            self._scopes.append(scope)
        for one in self.inputs:
            self.values[one.name] = tuple(scope[one.name] for scope in self._scopes)

    def layer(self, code: str) -> str:
        """A layer of the module, or one that is there already: weights may be shared."""
        for at, line in enumerate(self.layers):
            if line.partition(" = ")[2] == code and self.rng.random() < 0.5:
                return f"self.m{at}"
        name = f"m{len(self.layers)}"
        made = eval(code, {"torch": torch, "nn": nn})
        if isinstance(made, nn.Module):
            made.eval()
        setattr(self._module, name, made)
        self.layers.append(f"self.{name} = {code}")
        return f"self.{name}"

    def fresh(self) -> str:
        """A name no variable has."""
        self._count += 1
        return f"v{self._count}"

    def write(self, code: str) -> bool:
        """Adds lines, if torch runs them for both sizes and the numbers are such that rounding stays small."""
        kept = [dict(scope) for scope in self._scopes]
        try:
            with torch.no_grad():
                for scope in self._scopes:
                    exec(code, scope)  # noqa: S102 - a line of a random module
                    for name in names_in(code):
                        self._fits(scope.get(name))
        except Exception:  # noqa: BLE001 - torch refuses the line, or its numbers are too large
            self._scopes[:] = kept
            return False
        shapes = [scope.keys() for scope in self._scopes]
        for name in sorted(names_in(code)):
            if all(name in keys for keys in shapes):
                self.values[name] = tuple(scope[name] for scope in self._scopes)
        self.lines.extend(code.splitlines())
        return True

    def _fits(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError("no tensor")
        if value.is_complex() or value.numel() > 20_000:
            raise ValueError("too large")
        if value.is_floating_point() and value.numel():
            known = value[value.isfinite()]
            if known.numel() and float(known.abs().max()) > _GREATEST:
                raise ValueError("numbers too large")
            if float(value.isnan().float().mean()) > 0.3:
                raise ValueError("too many NaN")

    def pick(self, suits: Callable[[Tensor], bool] = lambda _: True) -> str:
        """A variable: mostly one that was made last, so that chains become long."""
        found = [name for name, made in self.values.items() if suits(made[0])]
        if not found:
            raise LookupError
        if self.rng.random() < 0.6:
            return found[-1 - int(len(found) ** self.rng.random() - 1)]
        return self.rng.choice(found)

    def tensor(self, name: str) -> Tensor:
        """A variable's value for the first sizes."""
        return self.values[name][0]


def _inputs(rng: random.Random, width: int) -> list[Input]:
    layouts = ("contiguous", "contiguous", "contiguous", "transposed", "stepped", "offset", "expanded")
    dtype = rng.choices([torch.float32, torch.float64, torch.bfloat16, torch.float16], weights=[16, 2, 1, 1], k=1)[0]
    found = [Input("x0", dtype, ("B", "S", width), rng.choice(layouts))]
    more: list[tuple[torch.dtype, tuple[int | str, ...]]] = [
        (dtype, ("B", "S", width)),
        (dtype, ("B", 1, width)),
        (dtype, ("S", width)),
        (dtype, (width,)),
        (dtype, ("B", 2, "S", 4)),
        (dtype, ("B", 4, "S", 4)),
        (dtype, ()),
        (dtype, (0, width)),
        (dtype, ("B", "S")),
        (torch.int64, ("B", "S")),
        (torch.int64, ("B", "S")),
        (torch.int32, ("S",)),
        (torch.bool, ("B", "S")),
        (torch.bool, ("S", "S")),
        (torch.bool, ("B", "S", width)),
        (torch.float32, ("S", "S")),
        (torch.float64, ("B", "S", width)),
        (torch.int64, ()),
    ]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        kind, shape = rng.choice(more)
        found.append(Input(f"x{len(found)}", kind, shape, rng.choice(layouts), below=4))
    return found


def written(seed: int, length: int | None = None) -> Program:
    """The module of a seed."""
    from random_lines import LINES

    rng = random.Random(seed)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        writer = Writer(rng)
        writer.inputs = _inputs(rng, rng.choice([4, 8, 8, 12, 16]))
        writer.start()
        makers, weights = zip(*LINES, strict=True)
        wanted = length or rng.randint(2, 10)
        done = 0
        for _ in range(8 * wanted):
            maker = rng.choices(makers, weights=weights, k=1)[0]
            try:
                code = maker(writer)
            except Exception:  # noqa: BLE001, S112 - nothing suits, or torch refuses the layer
                continue
            done += code is not None and writer.write(code)
            if done == wanted:
                break
        names = list(writer.values)
        made = [name for name in names if name.startswith("v")] or names
        results = [made[-1], *rng.sample(names, min(len(names), rng.choice([0, 0, 1, 2])))]
        if rng.random() < 0.1:
            results.append(results[0])
    finally:
        torch.random.set_rng_state(state)
    sizes = rng.choice([(), (), SIZES[1:2], SIZES[1:2], SIZES[1:2], SIZES[2:3], SIZES[1:]])
    program = Program(seed, tuple(writer.inputs), tuple(writer.layers), tuple(writer.lines), tuple(results), sizes)
    return without_dead_layers(program)


def without_dead_layers(program: Program) -> Program:
    """The same without layers that no line reads. Their places are kept, so that the numbers of the others stay."""
    text = "\n".join(program.lines)
    layers = tuple(line for line in program.layers if re.search(rf"\b{re.escape(line.partition(' = ')[0])}\b", text))
    return replace(program, layers=layers)
