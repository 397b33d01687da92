"""A tokenizer that was resolved: whose it is, what identifies it, and who else gives its ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from layerzero._native import TextCall
from layerzero.tokenization.identity import Identity

#: The libraries, in the order in which what is registered is shown to them.
LIBRARIES = ("tokenizers", "tiktoken", "sentencepiece")
#: tiktoken's engine gives up, with a panic, on a piece that takes a million steps; a pattern takes one to three for a
#: character. Longer texts, which may be one piece, go to a tokenizer's own library.
LONGEST_FOR_TIKTOKEN = 1 << 18


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a library made of a file or an object."""

    object: Any
    """What its kernels work with."""
    identity: Identity
    ids: frozenset[int]
    """Every id it has a token for."""
    document: dict[str, Any] | None = None
    """Its settings, where another library may be built from them."""


@dataclass(slots=True)
class Tokenizer:
    """One tokenizer. Kernels find their library's object in ``libraries``."""

    id: str
    own: str
    """The library it belongs to."""
    identity: Identity
    ids: frozenset[int]
    libraries: dict[str, Any]
    refused: dict[str, str]
    """By library, why it does not serve this tokenizer."""
    namespace: str = ""
    """``id:hash``: what is remembered of one tokenizer is never taken for another's."""
    calls: dict[tuple[str, bool, bool], TextCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.namespace = f"{self.id}:{self.identity.hash}"

    def call(self, op: str, return_offsets: bool, longest: int) -> TextCall:
        """The call of an operation with this tokenizer, but for its texts, the longest of that length."""
        long = longest > LONGEST_FOR_TIKTOKEN and op == "tokenize.encode"
        known = self.calls.get((op, return_offsets, long))
        if known is None:
            refused = dict(self.refused)
            identity: dict[str, Any] = {"tokenizer_id": self.id, **self.identity.parameters()}
            if op == "tokenize.encode":
                identity["return_offsets"] = return_offsets
            if return_offsets and self.own != "tiktoken":
                refused.setdefault("tiktoken", f"its offsets are not those of {self.own}")
            if long and self.own != "tiktoken":
                refused.setdefault(
                    "tiktoken", f"texts of over {LONGEST_FOR_TIKTOKEN} characters may be too long for it"
                )
            known = TextCall(op, identity, self, self.own, list(refused.items()))
            self.calls[op, return_offsets, long] = known
        return known
