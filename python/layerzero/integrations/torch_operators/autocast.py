"""Autocast: which operators compute in the lower precision, and how the others are kept as they are.

Under autocast torch would cast inside of kernels, behind selection's back. So arguments are cast first, where the
operation is one of those that gain, and kernels run with autocast turned off.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from layerzero import _native
from layerzero.integrations.torch_operators.operators import Operator

# Matrix products, as in torch's own policy. All else stays in the dtype it comes in: norms and activations are limited
# by memory, and accumulate in float32 inside. States of attention are merged by weights, not by a product.
LOWERED = frozenset(f["name"] for f in _native.functions() if f["family"] in ("attention", "mlp")) - {"merge_states"}
# Slopes are multiplied by distances, so their error grows with them; kernels take them in float32. So they do the scales of
# integers.
_KEPT = frozenset(["alibi_slopes", "scales", "sinks"])
_CASTABLE = frozenset([torch.float32, torch.float16, torch.bfloat16])

# The dispatch keys of autocast, by device type; a device type of another library's has the name it was given.
_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "hpu": "AutocastHPU",
    "mps": "AutocastMPS",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "ipu": "AutocastIPU",
    "xla": "AutocastXLA",
    "privateuseone": "AutocastPrivateUse1",
}


def call_autocast(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a public function as autocast asks for, for callers inside of `torch.autocast`."""
    foreign = torch._C._get_privateuse1_backend_name()
    devices = (foreign if device == "privateuseone" else device for device in _KEYS)
    enabled = [device for device in devices if torch.is_autocast_enabled(device)]
    if name in LOWERED:
        args = tuple(_cast(arg) for arg in args)
        kwargs = {key: value if key in _KEPT else _cast(value) for key, value in kwargs.items()}
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        return getattr(_native, name)(*args, **kwargs)
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


def register_autocast(library: Any, operator: Operator, opname: str, lowered: bool) -> None:
    """Gives an operator the same behaviour where a graph, and not a function, calls it."""
    kernel = _kernel(operator, opname, lowered)
    for key in _KEYS.values():
        library.impl(opname, kernel, key)


def _kernel(operator: Operator, opname: str, lowered: bool) -> Callable[..., Any]:
    op = getattr(torch.ops.layerzero, opname).default
    kept = frozenset(operator.place(name) for name in _KEPT if name in operator.names)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    for key in _KEYS.values():
        keys = keys.add(torch._C._dispatch_key_parse(key))

    def kernel(*args: Any) -> Any:
        if lowered:
            args = tuple(arg if at in kept else _cast(arg) for at, arg in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args)

    return kernel


def _cast(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in _CASTABLE:
        return value
    device = value.device.type
    if not is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return value
    return value.to(torch.get_autocast_dtype(device))
