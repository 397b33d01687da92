"""Every exception LayerZero raises. Each says what was wrong, has a stable ``code`` and a ``hint`` what to do about it."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.inspection import Reason


#: Control characters, but for new lines and tabs, as the text that shows them.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """The text with its control characters shown: names and values of others must not steer a terminal."""
    return text.translate(_SHOWN)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its class if it has no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def named_line(error: BaseException) -> str:
    """The class of an exception, and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


class LayerZeroError(Exception):
    """The base of all exceptions of LayerZero. It has a stable ``code``, a message, and a ``hint``."""

    def __init__(self, message: str, *, code: str = "ERROR", hint: str = "") -> None:
        message, hint = visible(message), visible(hint)
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f"\n  hint: {self.hint}" if self.hint else "")

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {"type": type(self).__name__, "code": self.code, "message": self.message, "hint": self.hint}


class InvalidCallError(LayerZeroError, ValueError):
    """The arguments contradict the operation's schema, or each other."""


class ArgumentTypeError(InvalidCallError, TypeError):
    """An argument is missing, unknown, or not of a type the function takes."""


class UnsupportedTensorError(LayerZeroError, TypeError):
    """A tensor of a kind LayerZero does not work on: sparse, nested, on an unknown device."""


class NoKernelFoundError(LayerZeroError, RuntimeError):
    """No kernel can serve the call. ``failures`` has the reasons of every candidate."""

    def __init__(
        self, message: str, *, operation: str = "", failures: dict[str, list[Reason]] | None = None, **rest: str
    ) -> None:
        super().__init__(message, **rest)
        self.operation = operation
        self.failures = failures or {}

    def to_dict(self) -> dict[str, Any]:
        """The same as data, with every candidate's reasons."""
        reasons = {kernel: [r.to_dict() for r in reasons] for kernel, reasons in self.failures.items()}
        return {**super().to_dict(), "operation": self.operation, "failures": reasons}


class CudaGraphUnsafeError(NoKernelFoundError):
    """No kernel that is safe inside CUDA graph capture can serve the call."""


class KernelExecutionError(LayerZeroError, RuntimeError):
    """Every kernel that was tried failed. ``failures`` has the exception of each, in order."""

    def __init__(
        self, message: str, *, operation: str = "", failures: dict[str, BaseException] | None = None, **rest: str
    ) -> None:
        super().__init__(message, **rest)
        self.operation = operation
        self.failures = failures or {}

    def to_dict(self) -> dict[str, Any]:
        """The same as data, with what each kernel said."""
        said = {kernel: f"{type(e).__name__}: {e}" for kernel, e in self.failures.items()}
        return {**super().to_dict(), "operation": self.operation, "failures": said}


class InputModifiedError(KernelExecutionError):
    """A kernel changed a tensor it may only read and then failed, so that no other kernel can serve the call."""


class UnsupportedDerivativeError(LayerZeroError, NotImplementedError):
    """A derivative LayerZero's operators do not have: forward mode, or the second one."""


class UnknownOperationError(LayerZeroError, LookupError):
    """There is no operation of that name."""


class UnknownKernelError(LayerZeroError, LookupError):
    """There is no kernel of that id."""


class UnknownTokenizerError(LayerZeroError, LookupError):
    """There is no tokenizer of that id on this machine."""


class BadTokenizerError(LayerZeroError, ValueError):
    """A tokenizer that cannot be read, or whose library is missing."""


class ConfigurationError(LayerZeroError, ValueError):
    """A setting, a file or a registration is wrong. Nothing was changed."""


class CapabilitiesError(ConfigurationError):
    """A capabilities document was refused. Its backend is disabled."""


class ExportError(LayerZeroError, RuntimeError):
    """A model that cannot become a graph. ``line`` says where in the model, if that is known."""

    def __init__(self, message: str, *, line: str = "", **rest: str) -> None:
        super().__init__(f"{message} ({line})" if line else message, **rest)
        self.line = line

    def to_dict(self) -> dict[str, Any]:
        """The same as data, with the line of the model."""
        return {**super().to_dict(), "line": self.line}


class LayerZeroInternalError(LayerZeroError, RuntimeError):
    """A defect of LayerZero's own."""


class LayerZeroWarning(UserWarning):
    """Something worth knowing that is no error: a fallback that ran, strides that contradict a layout."""


class _Held(threading.local):
    texts: dict[str, None] | None = None


_held = _Held()


def hold(texts: dict[str, None] | None) -> None:
    """From now on this thread's warnings are collected here, each once, instead of given; with ``None`` they are given."""
    _held.texts = texts


def warn(text: str) -> None:
    """Gives a warning at the line of the call that caused it."""
    text = visible(text)
    if _held.texts is not None:
        _held.texts[text] = None
        return
    warnings.warn(text, LayerZeroWarning, stacklevel=2)
