"""Hugging Face tokenizers (`tokenizers`), run at 0.23.3. The library is imported when the first tokenizer needs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.tokenization.identity import Identity, digest
from layerzero.tokenization.tokenizer import Loaded, Tokenizer

from .._shared.library import Library

detect = Library("tokenizers").installed


def is_mine(given: Any) -> bool:
    """Whether this is a `tokenizers.Tokenizer`, or a fast tokenizer of transformers, which holds one."""
    inside = getattr(given, "backend_tokenizer", given)
    return all(hasattr(inside, name) for name in ("to_str", "encode_batch", "pre_tokenizer"))


def from_file(path: Path) -> Loaded:
    """Reads a `tokenizer.json`."""
    return _load(path.read_text(encoding="utf-8"), False)


def from_object(given: Any) -> Loaded:
    """A copy: what is done to the object later changes nothing here."""
    inside = getattr(given, "backend_tokenizer", given)
    text, as_text = inside.to_str(), bool(getattr(inside, "encode_special_tokens", False))
    if inside is not given:
        # transformers sets truncation, and this, anew for every call it makes.
        text = json.dumps({**json.loads(text), "truncation": None})
        as_text = bool(getattr(given, "split_special_tokens", False))
    return _load(text, as_text)


def _load(text: str, special_tokens_as_text: bool) -> Loaded:
    from tokenizers import Tokenizer as Native

    native = Native.from_str(text)
    # Texts of one call do not depend on each other.
    native.no_padding()
    document: dict[str, Any] = json.loads(native.to_str())
    if special_tokens_as_text:
        # No part of what is saved.
        native.encode_special_tokens = document["encode_special_tokens"] = True
    model = document["model"]
    if model.get("dropout"):
        raise ValueError(f"its model drops merges at random (dropout {model['dropout']}); set it to null")
    return Loaded(native, identity(document), frozenset(native.get_vocab(with_added_tokens=True).values()), document)


def identity(document: dict[str, Any]) -> Identity:
    """The hashes of a `tokenizer.json`."""
    added = document["added_tokens"]
    special = [token for token in added if token["special"]]
    as_text = ["encode_special_tokens"] if document.get("encode_special_tokens") else []
    return Identity(
        vocab_hash=digest({key: value for key, value in document["model"].items() if key != "merges"}),
        merges_hash=digest(document["model"].get("merges", [])),
        added_tokens_hash=digest(added),
        normalizer_id=digest(document["normalizer"]),
        pretokenizer_id=digest([document["pre_tokenizer"], document["decoder"]]),
        special_tokens_hash=digest(
            [special, document["post_processor"], document["truncation"], *as_text],
        ),
    )


def encode(texts: list[str], tokenizer: Tokenizer, return_offsets: bool) -> Any:
    """Ids, or ids and offsets, of each text."""
    native = tokenizer.libraries["tokenizers"]
    if return_offsets:
        encodings = native.encode_batch(texts)
        return [e.ids for e in encodings], [e.offsets for e in encodings]
    if len(texts) == 1:
        return [native.encode(texts[0]).ids]
    return [e.ids for e in native.encode_batch_fast(texts)]


def decode(tokens: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of each list of ids, special tokens left out, as the library does."""
    native = tokenizer.libraries["tokenizers"]
    if len(tokens) == 1:
        return [native.decode(tokens[0])]
    texts: list[str] = native.decode_batch(tokens)
    return texts


KERNELS: dict[str, Callable[..., Any]] = {"tokenizers.encode": encode, "tokenizers.decode": decode}
