"""What a tokenizer is: full SHA-256 hashes of all its parts. Two tokenizers of one identity give the same ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


def digest(value: Any) -> str:
    """The SHA-256 of bytes, or of data in its one JSON form."""
    if not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    return hashlib.sha256(value).hexdigest()


@dataclass(frozen=True, slots=True)
class Identity:
    """The hashes selection and caches go by."""

    vocab_hash: str
    """The vocabulary, and the settings of the model that uses it."""
    merges_hash: str
    added_tokens_hash: str
    normalizer_id: str
    pretokenizer_id: str
    """How a text is cut into pieces, and how pieces become a text again."""
    special_tokens_hash: str
    """Special tokens, and what puts them into a text: post-processor, truncation."""

    def parameters(self) -> dict[str, str]:
        """By the names the operations have for them."""
        return asdict(self)

    @property
    def hash(self) -> str:
        """All of them in one."""
        return digest(asdict(self))
