"""SentencePiece (`sentencepiece`), run at 0.2.2. The library is imported when the first tokenizer needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.tokenization.identity import Identity, digest
from layerzero.tokenization.tokenizer import Loaded, Tokenizer

from .._shared.library import Library

#: What a processor may be told to do to every text.
_OPTIONS = ("add_bos", "add_eos", "reverse")


detect = Library("sentencepiece").installed


def is_mine(given: Any) -> bool:
    """Whether this is a `SentencePieceProcessor`."""
    return hasattr(given, "serialized_model_proto")


def from_file(path: Path) -> Loaded:
    """Reads a model."""
    return _load(path.read_bytes(), {})


def from_object(given: Any) -> Loaded:
    """A copy: what is done to the processor later changes nothing here."""
    if getattr(given, "_enable_sampling", False):
        raise ValueError("it samples, so that one text has many tokens; make one without enable_sampling")
    return _load(given.serialized_model_proto(), {name: bool(getattr(given, f"_{name}", False)) for name in _OPTIONS})


def _load(model: bytes, options: dict[str, bool]) -> Loaded:
    from sentencepiece import SentencePieceProcessor

    if not model:
        raise ValueError("it is empty")
    said = {name: options.get(name, False) for name in _OPTIONS}
    processor = SentencePieceProcessor(
        model_proto=model, add_bos=said["add_bos"], add_eos=said["add_eos"], reverse=said["reverse"]
    )
    # The model holds its normalizer and how it cuts texts as well.
    whole, nothing = digest(model), digest([])
    identity = Identity(whole, nothing, nothing, whole, whole, digest(said))
    return Loaded(processor, identity, frozenset(range(processor.vocab_size())))


def encode(texts: list[str], tokenizer: Tokenizer, return_offsets: bool) -> Any:
    """Ids, or ids and offsets, of each text."""
    processor = tokenizer.libraries["sentencepiece"]
    ids = processor.encode(texts, return_type=int) if len(texts) > 1 else [processor.encode(texts[0], return_type=int)]
    if not return_offsets:
        return ids
    return ids, [_offsets(processor, found) for found in processor.encode(texts, return_type="offset_mapping")]


def _offsets(processor: Any, found: dict[str, Any]) -> list[tuple[int, int]]:
    """The library's offsets, which know nothing of what it does to the ids besides. What it adds stands for no text."""
    offsets: list[tuple[int, int]] = found["offsets"]
    if processor._reverse:
        offsets = offsets[::-1]
    return [*[(0, 0)] * processor._add_bos, *offsets, *[(0, 0)] * processor._add_eos]


def decode(tokens: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of each list of ids."""
    processor = tokenizer.libraries["sentencepiece"]
    return [processor.decode(ids) if ids else "" for ids in tokens]


KERNELS: dict[str, Callable[..., Any]] = {"sentencepiece.encode": encode, "sentencepiece.decode": decode}
