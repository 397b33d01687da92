"""Kernels of one's own: ``@lz.register_kernel``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from layerzero import _native, fingerprints, loading
from layerzero.documents import to_json
from layerzero.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

#: Arguments of a kernel function that say nothing about what it supports.
_ALWAYS = {"layout", "seed"}


def register_kernel(
    *,
    operation: str,
    kernel_id: str,
    platform: str | Sequence[str],
    supported_dtypes: Sequence[Any],
    layouts: Sequence[str] | None = None,
    version: str = "0",
    priority: int = 50,
    trusted: bool = False,
    **capabilities: Any,
) -> Callable[[Function], Function]:
    """Registers the decorated function as a kernel of an operation.

    The names of its parameters say which arguments of the operation it uses, in any order. It is not called if an
    argument that it does not name differs from its default. (Promises like ``shared_prefix`` are an exception, because no
    result depends on them.) It returns the operation's result in the layout of its inputs.

    Args:
        operation: the operation or alias it serves, e.g. ``"attention.causal"``.
        kernel_id: its id; the part before the first dot is its backend.
        platform: where it runs: ``"cpu"``, ``"cuda"``, … or several.
        supported_dtypes: dtypes of its data, as torch dtypes or names.
        layouts: layouts it takes, ``"BSHD"`` for attention when not given, ``"contiguous"`` elsewhere. Arguments in
            another layout are transposed first.
        version: its version; several versions of one id may be registered.
        priority: 0 to 100; higher is preferred while nothing is measured. With equal scores a kernel that is built in
            goes first.
        trusted: use it without comparing it with the reference, because you vouch for it. By default it is compared at
            its first use for each class of call, and serves if it is right.
        capabilities: anything else a capabilities document may say of a kernel (``min_sm``, ``max_head_dim``,
            ``deterministic``, ``autograd``, ``dims``, ``conditions``, …). What is not said is not supported.
    """

    def register(function: Function) -> Function:
        loading.load(registering=True)
        names = loading.parameters(function)
        kernel = _describe(operation, kernel_id, platform, supported_dtypes, layouts, names, capabilities)
        document = {
            "schema_version": "1.0",
            "backend": kernel_id.partition(".")[0],
            "backend_version": version,
            "plugin_origin": "code",
            "platform": platform if isinstance(platform, str) else list(platform),
            "ops": {operation: [{"priority": priority, **kernel}]},
        }
        _native.register(to_json(document), (kernel_id, function, names), "vouched" if trusted else "unproven")
        loading.note_registered([kernel_id], kernel_id.partition(".")[0])
        fingerprints.said("kernel", kernel_id, version, priority)
        return function

    return register


class Turned(NamedTuple):
    """In a plan of :func:`direct`: a tensor of four dimensions with the second and the third exchanged. The result is
    turned back."""

    tensor: Any


def direct(plan: Callable[..., tuple[Any, ...] | None]) -> Callable[[Function], Function]:
    """Marks a kernel that comes down to a single call of its library, for arguments of some kinds.

    ``plan`` takes the kernel's arguments, in its order, and returns the call the kernel would make,
    ``(function, arguments)`` or ``(function, arguments, keywords)``, or ``None`` when it takes more than one. It is
    asked once for a kind of call (sizes, strides, dtypes and scalars are then the same); from then on the call is made
    without the kernel's Python code, with the tensors at hand in the place of the ones the plan was made with.
    """

    def mark(function: Function) -> Function:
        function.direct = plan  # type: ignore[attr-defined]
        return function

    return mark


def draws(function: Function) -> Function:
    """Marks a kernel that draws from torch's default generator where its ``seed`` is ``None``.

    Other kernels are always given a seed, which is drawn from that generator first.
    """
    function.draws_itself = True  # type: ignore[attr-defined]
    return function


def unregister_kernel(kernel_id: str) -> None:
    """Removes a kernel; calls under way finish with it."""
    _native.unregister(kernel_id)
    fingerprints.said("no kernel", kernel_id)


def _describe(
    operation: str,
    kernel_id: str,
    platform: str | Sequence[str],
    dtypes: Sequence[Any],
    layouts: Sequence[str] | None,
    names: list[str],
    capabilities: dict[str, Any],
) -> dict[str, Any]:
    schema = _native.schema(operation)
    attention = operation.startswith("attention") and "paged" not in operation and "mla" not in operation
    kernel: dict[str, Any] = {
        "kernel_id": kernel_id,
        "dtypes": [str(d).removeprefix("torch.") for d in dtypes],
        "requires_layouts": list(layouts) if layouts else ["BSHD" if attention and schema["layouts"] else "contiguous"],
    }
    if layouts is None and schema["layouts"] and not attention:
        kernel["requires_layouts"] = [schema["layouts"][0]]
    platforms = [platform] if isinstance(platform, str) else list(platform)
    if "cuda" in platforms:
        kernel["min_sm"] = None
    for dim in schema["must_constrain"]:
        if dim == "head_dim":
            kernel |= {"min_head_dim": None, "max_head_dim": None}
        else:
            kernel.setdefault("dims", {})[dim] = {}
    kernel |= capabilities
    known = {name: kind for kind in ("inputs", "params") for name in schema[kind]}
    aliases = schema["aliases"]
    for name in names:
        proper = aliases.get(name, name)
        if proper in _ALWAYS:
            continue
        if proper not in known:
            near = ", ".join(known)
            raise ConfigurationError(
                f"'{kernel_id}' takes '{name}', which {operation} does not have",
                code="BAD_ADAPTER",
                hint=f"name its parameters after the operation's: {near}",
            )
        if schema[known[proper]][proper]:
            kernel[known[proper]] = {proper: {}, **kernel.get(known[proper], {})}
    return kernel
