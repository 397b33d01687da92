"""The masks of transformers' models, described instead of stored.

transformers asks a mask function once per forward pass, and hands what it returns to every attention call. A causal mask
of n queries and m keys is n·m bytes; its description is three numbers, which `lz.attention` has arguments for. So the
mask function here returns a :class:`DescribedMask`: a tensor of the mask's shape without memory. The attention function
reads the description. Everyone else (a model that slices the mask, adds to it or moves it) gets the real mask, which is
made at the first such use.

What no description fits (padding, packed sequences, chunks, functions of the user) is a boolean mask, made by
transformers' own function.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map
from transformers import masking_utils as theirs

__all__ = ["Described", "DescribedMask", "Written", "additive", "mask", "stored", "written"]


@dataclass(frozen=True)
class Described:
    """A mask in numbers: query i may attend to key j if ``i + offset - earlier <= j <= i + offset + later``.

    ``None`` is no bound. A causal mask has ``later`` 0.
    """

    queries: int
    keys: int
    offset: int
    earlier: int | None
    later: int | None

    def tensor(self, device: Any) -> torch.Tensor:
        """The mask as booleans, (1, 1, queries, keys)."""
        at = torch.arange(self.queries, device=device)[:, None] + self.offset
        key = torch.arange(self.keys, device=device)[None, :]
        allowed = torch.ones(self.queries, self.keys, dtype=torch.bool, device=device)
        if self.later is not None:
            allowed &= key <= at + self.later
        if self.earlier is not None:
            allowed &= key >= at - self.earlier
        return allowed[None, None]


class DescribedMask(torch.Tensor):
    """A boolean mask (batch, 1, queries, keys) without memory. Any use of its numbers makes them."""

    described: Described
    made: torch.Tensor | None

    @staticmethod
    def of(described: Described, batch: int, device: Any) -> DescribedMask:
        """The mask of a description, on a device."""
        shape = (batch, 1, described.queries, described.keys)
        # One number, repeated by strides of 0: nobody reads it.
        mask = torch.empty((), dtype=torch.bool, device=device).expand(shape).as_subclass(DescribedMask)
        mask.described, mask.made = described, None
        return mask

    def tensor(self) -> torch.Tensor:
        """The real mask."""
        if self.made is None:
            self.made = self.described.tensor(self.device).expand(self.shape)
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _getters() -> set[Any]:
    names = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "grad_fn", "is_leaf")
    return {getattr(torch.Tensor, name).__get__ for name in names} | {
        torch.Tensor.dim,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
    }


#: What can be asked of a mask without making it.
_LOOKS = _getters()


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as transformers' own attention functions add it to the scores: 0, and the dtype's lowest number."""
    if isinstance(mask, DescribedMask):
        mask = mask.tensor()
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Written:
    """What the source of a modeling file says about its attention."""

    #: Attention is looked up by its name, or is that of other files. Otherwise it is computed here, whatever the name.
    by_name: bool
    #: Of each attention class that computes its scores itself from a mask: the names in the annotation of its ``config``.
    computing: tuple[frozenset[str], ...]
    #: The same of each attention class that looks the function up by name.
    looking_up: tuple[frozenset[str], ...]
    #: It compares the name with others, and does something else for those.
    compares: bool
    #: Arguments it gives to the attention function by name.
    arguments: frozenset[str]

    def serves(self, config: type) -> bool:
        """Whether all attention of a kind of configuration is looked up by name, so that none adds the mask to its scores itself.

        A file may have both kinds, as GIT does. Then only annotations that name another configuration exclude a class.
        """
        if not self.by_name or not self.computing:
            return self.by_name
        names = {kind.__name__ for kind in config.__mro__}
        if any(not known or known & names for known in self.computing):
            return False
        return any(known & names for known in self.looking_up)


_UNKNOWN = Written(False, (), (), True, frozenset())


@cache
def written(module: str) -> Written:
    """What the modeling file of this module name says; of one without source: that it computes attention itself."""
    found = sys.modules.get(module)
    if found is None:
        return _UNKNOWN
    try:
        tree = ast.parse(inspect.getsource(found))
    except (OSError, TypeError, SyntaxError):
        return _UNKNOWN
    arguments: set[str] = set()
    compares, attends = False, False
    computing, looking_up = [], []
    # Functions of the file that classes may call for their scores.
    scoring = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _scores(_names(node))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            attends |= "Attention" in node.name
            if "atten" not in node.name.lower() and "attn" not in node.name.lower():
                continue
            names = _names(node)
            if names & {"attention_interface", "ALL_ATTENTION_FUNCTIONS"}:
                looking_up.append(_config_of(node))
            elif (_scores(names) or names & scoring) and _is_given_a_mask(node):
                computing.append(_config_of(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface":
            arguments.update(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
            compares |= node.left.attr == "_attn_implementation"
    by_name = "ALL_ATTENTION_FUNCTIONS" in vars(found) or not attends
    return Written(by_name, tuple(computing), tuple(looking_up), compares, frozenset(arguments))


def _names(node: ast.AST) -> set[str]:
    """Every name and attribute in a piece of source."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _scores(names: set[str]) -> bool:
    """Whether source with these names computes attention."""
    return any("softmax" in name.lower() or name == "scaled_dot_product_attention" for name in names)


def _functions(node: ast.ClassDef) -> dict[str, list[ast.arg]]:
    """The arguments of a class's functions, by name."""
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return {part.name: [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs] for part in functions}


def _is_given_a_mask(node: ast.ClassDef) -> bool:
    """Whether ``forward`` has a mask among its arguments; of a class that inherits ``forward`` nobody knows: yes."""
    arguments = _functions(node).get("forward")
    return arguments is None or any("mask" in argument.arg for argument in arguments)


def _config_of(node: ast.ClassDef) -> frozenset[str]:
    """The names in the annotation of the configuration that a class is built with; none where it has no annotation."""
    for argument in _functions(node).get("__init__", []):
        if argument.arg == "config" and argument.annotation is not None:
            return frozenset(re.findall(r"\w+", ast.unparse(argument.annotation)))
    return frozenset()


def _window_of(function: Callable[..., Any]) -> tuple[int | None, int | None] | None:
    """(earlier, later) of a mask function of transformers; None where it is another one.

    They are closures: a window and a causal mask, in an intersection. Nothing is guessed from names of arguments.
    """
    if function is theirs.causal_mask_function:
        return None, 0
    if function is getattr(theirs, "bidirectional_mask_function", _window_of):
        return None, None
    parts = _inside(function, "and_masks").get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, base = parts
    if base is theirs.causal_mask_function:
        size = _inside(overlay, "sliding_window_overlay").get("sliding_window")
        return (size - 1, 0) if isinstance(size, int) and size > 0 else None
    if base is getattr(theirs, "bidirectional_mask_function", _window_of):
        size = _inside(overlay, "sliding_window_bidirectional_overlay").get("sliding_window")
        return (size, size) if isinstance(size, int) and size >= 0 else None
    return None


def _inside(function: Any, maker: str) -> Mapping[str, Any]:
    """The variables of a closure that this function of transformers made; nothing where another one did."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", "") != "transformers.masking_utils" or not name.startswith(f"{maker}.<locals>."):
        return {}
    return dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )


_stored: ContextVar[bool] = ContextVar("stored masks", default=False)


@contextmanager
def stored() -> Iterator[None]:
    """Has masks made in a block be tensors, whatever they are: a CUDA graph can read them again, and no numbers."""
    before = _stored.set(True)
    try:
        yield
    finally:
        _stored.reset(before)


def _replays() -> bool:
    """Whether steps of a model are replayed as CUDA graphs: then nobody waits for the device to describe a mask."""
    graphs = sys.modules.get("layerzero.integrations.models.step_graphs")
    return graphs is not None and graphs.active()


def _tracing(*tensors: Any) -> bool:
    """Whether numbers cannot be read: a graph is being recorded or replayed, or the tensors have none."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or _stored.get():
        return True
    if _replays() and any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors):
        return True
    return any(isinstance(t, FakeTensor) or isinstance(t, torch.Tensor) and t.is_meta for t in tensors)


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    cache_position: torch.Tensor | None = None,
    device: Any = None,
    **given: Any,
) -> torch.Tensor | None:
    """The mask function for transformers' ``AttentionMaskInterface``. Arguments are those of its ``sdpa_mask``."""
    function = theirs.causal_mask_function if mask_function is None else mask_function
    same: dict[str, Any] = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, **given}
    same |= {"mask_function": function, "attention_mask": attention_mask}
    if cache_position is None:
        same |= {"q_length": q_length, "q_offset": q_offset}
    else:
        # Before transformers 5.0: the positions of the queries.
        same["cache_position"] = cache_position
        q_length = cache_position.shape[0]
        device = cache_position.device if device is None else device
    if device is not None:
        same["device"] = device
    assert q_length is not None
    # A configuration and its model are neighbours, by transformers' rule for names of files.
    config = type(given.get("config"))
    file = config.__module__.replace("configuration_", "modeling_")
    if "config" in given and _computes_itself(file, config):
        # What computes its scores itself adds the mask to them.
        return theirs.eager_mask(**same)  # type: ignore[no-any-return]
    same |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    if _tracing(attention_mask, cache_position, q_offset):
        plain = skips and _plain(function, attention_mask, q_length, kv_length, q_offset, kv_offset, cache_position)
        if plain and not _compares(file):
            return None
        return theirs.sdpa_mask(**same)  # type: ignore[no-any-return]
    window = _window_of(function) if skips else None
    if window is None:
        return theirs.sdpa_mask(**same)  # type: ignore[no-any-return]
    first = q_offset if cache_position is None else cache_position[0]
    described = Described(q_length, kv_length, int(first) - kv_offset, *window)
    if attention_mask is not None:
        # Keys that are padding, among those that a query may attend to.
        end = kv_length if described.later is None else min(kv_length, described.offset + q_length + described.later)
        seen = attention_mask[:, kv_offset : kv_offset + end]
        if seen.shape[1] < end or not bool(seen.all()):
            return theirs.sdpa_mask(**same)  # type: ignore[no-any-return]
    if not _compiles():
        return DescribedMask.of(described, batch_size, device)
    unbounded = described.earlier is None or described.earlier >= kv_length - 1
    if described.later == 0 and described.offset == 0 and q_length == kv_length and unbounded and not _compares(file):
        return None
    return described.tensor(device).expand(batch_size, 1, q_length, kv_length)


def _compiles() -> bool:
    """Whether this program compiles: a layer that is compiled by itself cannot be given a mask without memory."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and getattr(dynamo, "FRAME_COUNTER", 1) > 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _computes_itself(module: str, config: type) -> bool:
    return not written(module).serves(config)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compares(module: str) -> bool:
    return written(module).compares


def _plain(
    function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    queries: int,
    keys: int,
    q_offset: Any,
    kv_offset: int,
    cache_position: Any,
) -> bool:
    """Whether a graph may be recorded without a mask: a causal call of all positions at once, nothing padded."""
    if attention_mask is not None or cache_position is not None or function is not theirs.causal_mask_function:
        return False
    if isinstance(q_offset, torch.Tensor):
        return False
    # A single query attends to every key that a growing cache has.
    return bool((q_offset == 0 and kv_offset == 0 and queries == keys) or (queries == 1 and q_offset + 1 == keys))
