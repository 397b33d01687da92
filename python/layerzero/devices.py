"""Which device is meant where nobody says, and what the devices are that torch has.

The device of a call is that of its tensors. Where there are none (``lz.tune``, ``lz.explain_call``, the commands), it is
torch's accelerator in use, else the CPU. An explicit ``device=`` always wins. Nothing else in the package decides this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from layerzero import _native
from layerzero.errors import ConfigurationError, LayerZeroError

CPU = "cpu"
#: The group of entry points by which torch imports the backends of other vendors.
_AUTOLOADED = "torch.backends"


def resolve(device: Any = None, of: Iterable[Any] = ()) -> str:
    """What torch calls the device that is meant: the one that was given, else that of the first of these tensors (or
    calls) that has one, else the accelerator in use, else the CPU.

    Raises :class:`ConfigurationError` for a device that is none, or is given and not here.
    """
    if device is None:
        found = next((found for found in map(_of, of) if found is not None), None)
        return in_use() if found is None else _named(found)
    name = _named(device)
    try:
        _native.device_number(name)
    except LayerZeroError as error:
        raise _bad(device, error.message, error.hint or "") from None
    return name


def number(device: Any = None, of: Iterable[Any] = ()) -> int:
    """The engine's number of the device that is meant; see :func:`resolve`."""
    return int(_native.device_number(resolve(device, of)))


def cuda_index(device: int) -> int | None:
    """The index CUDA gives to a device of the engine; ``None`` for the host and for other accelerators."""
    kind, _, index = _native.device_name(device).partition(":")
    return int(index) if kind == "cuda" else None


def in_use() -> str:
    """What torch calls its accelerator in use, with its current number; ``cpu`` where there is none, or no torch."""
    from layerzero.loading import torch_is_there

    if not torch_is_there():
        return CPU
    import torch

    if not torch.accelerator.is_available():
        return CPU
    accelerator = torch.accelerator.current_accelerator()
    return CPU if accelerator is None else f"{accelerator.type}:{torch.accelerator.current_device_index()}"


def cpu() -> dict[str, Any]:
    """The description of this machine's CPU."""
    found: dict[str, Any] = json.loads(_native.devices())[0]
    return found


def cpu_name() -> str:
    """The name of this machine's CPU."""
    return str(cpu()["name"])


def in_use_by_files(cuda: int) -> str:
    """The same for a process that has made no calls yet, without importing torch where its files tell enough. ``cuda`` is
    how many CUDA devices the driver shows."""
    import sys
    from importlib.metadata import entry_points

    from layerzero.compat import builds

    build = builds.torch_build()
    is_simple = build.hip is None and build.xpu is None and sys.platform != "darwin"
    if "torch" in sys.modules or not is_simple or tuple(entry_points(group=_AUTOLOADED)):
        return in_use()
    return "cuda:0" if build.cuda is not None and cuda > 0 else CPU


def described(torch_type: str) -> list[str]:
    """The devices torch has of a type, as descriptions in JSON; none where torch does not know the type or has no such
    device. CUDA devices are not among them: the driver tells more about those."""
    from layerzero.loading import torch_is_there

    if not torch_is_there():
        return []
    import torch

    platform = _platform(torch_type)
    if platform is None:
        return []
    try:
        module = torch.get_device_module(torch_type)
        count = int(module.device_count()) if module.is_available() else 0
    except (AttributeError, RuntimeError, ValueError):
        return []
    return [json.dumps(_description(torch_type, platform, module, index)) for index in range(count)]


def _platform(torch_type: str) -> str | None:
    """The engine's word for devices of a type: `rocm`, `xpu`, `hpu`, `mps` or `privateuse1`."""
    import torch

    if torch_type in ("xpu", "hpu", "mps"):
        return torch_type
    if torch_type == "cuda":
        return "rocm" if torch.version.hip is not None else None
    # A backend of another vendor may have given its devices a name of their own.
    own = torch._C._get_privateuse1_backend_name()
    return "privateuse1" if torch_type in (own, "privateuseone") else None


def _description(torch_type: str, platform: str, module: Any, index: int) -> dict[str, Any]:
    properties = _asked(module, "get_device_properties", index)
    description: dict[str, Any] = {
        "platform": platform,
        "name": str(_asked(module, "get_device_name", index) or getattr(properties, "name", "") or torch_type.upper()),
        "torch_type": torch_type,
    }
    if memory := getattr(properties, "total_memory", None):
        description["memory_bytes"] = int(memory)
    if gfx := str(getattr(properties, "gcnArchName", "")).partition(":")[0]:
        description["gfx"] = gfx
    return description


def _asked(module: Any, function: str, index: int) -> Any:
    """What a module of torch says about a device; ``None`` where it does not say."""
    try:
        return getattr(module, function)(index)
    except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError):
        return None


def _of(value: Any) -> Any:
    """The device of a tensor, or of a call that was traced or made; of one without memory there is none."""
    found = value.get("device") if isinstance(value, dict) else getattr(value, "device", None)
    return None if found is None or str(found) in ("", "meta") else found


def _named(device: Any) -> str:
    """A device with its number, as torch writes those of tensors. Without a number it is the current one of its kind."""
    from layerzero.loading import torch_is_there

    if not torch_is_there():
        return str(device)
    import torch

    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise _bad(device, f"{device!r} is no device", "write it as torch does: 'cpu', 'cuda:0'")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _bad(device, str(error).partition("\n")[0], "write it as torch does: 'cpu', 'cuda:0'") from None
    if found.type == CPU:
        return CPU
    if found.index is not None:
        return str(found)
    current = in_use()
    return current if current.partition(":")[0] == found.type else f"{found.type}:0"


def _bad(device: Any, why: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"device={device!r}: {why}", code="BAD_DEVICE", hint=hint)
