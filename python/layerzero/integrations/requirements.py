"""Which version of another library an integration needs."""

import importlib
import re

from layerzero.errors import ConfigurationError


def require(library: str, oldest: tuple[int, int], lacks: str, code: str) -> None:
    """Imports a library. An error if there is none, or an older one; `lacks` says what that does not have."""
    try:
        found: str = importlib.import_module(library).__version__
    except ImportError as error:
        raise ConfigurationError(
            f"{library} cannot be imported: {error}", code="MISSING_LIBRARY", hint=f"install it: pip install {library}"
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < oldest:
        hint = f"install {library} {oldest[0]}.{oldest[1]} or newer"
        raise ConfigurationError(f"{library} {found} has no {lacks}", code=code, hint=hint)
