"""How attention that LayerZero does not serve inside another library is refused: never computed wrongly, always named."""

from layerzero.errors import InvalidCallError


def unsupported(who: str, what: str, hint: str) -> InvalidCallError:
    """The error to raise: who refuses, what is not served, and what to use instead."""
    return InvalidCallError(f"{who} does not serve {what}", code="UNSUPPORTED_ATTENTION", hint=hint)
