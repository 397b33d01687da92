"""tiktoken, run at 0.14.0: its own encodings, and byte-level BPE of others that `proof` has shown to be the same. The
library is imported when the first tokenizer needs it."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.errors import InvalidCallError
from layerzero.tokenization.identity import Identity, digest
from layerzero.tokenization.tokenizer import Loaded, Tokenizer

from .._shared.library import Library

#: So many characters are worth threads: some ten milliseconds of work, against less than one to start them.
_WORTH_THREADS = 1 << 15
_MOST_THREADS = 8


detect = Library("tiktoken").installed


@dataclass(frozen=True, slots=True)
class Bpe:
    """An encoding, and what it has to do besides to give a tokenizer's ids."""

    encoding: Any
    specials: frozenset[str] = frozenset()
    """Tokens that are looked for in texts; tiktoken's own encodings take them for text."""
    prefix: list[int] = field(default_factory=list)
    suffix: list[int] = field(default_factory=list)
    hidden: frozenset[int] = frozenset()
    """Ids that are left out of texts."""
    signs: tuple[str, ...] = ()
    """Every text that holds one of `specials` holds one of these."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        for sign in self.signs:
            if sign in text:
                ids: list[int] = self.encoding.encode(text, allowed_special=self.specials, disallowed_special=())
                break
        else:
            ids = self.encoding.encode_ordinary(text)
        return [*self.prefix, *ids, *self.suffix] if self.prefix or self.suffix else ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        if self.hidden and not self.hidden.isdisjoint(ids):
            ids = [i for i in ids if i not in self.hidden]
        text: str = self.encoding.decode(ids)
        return text


@contextmanager
def panics() -> Iterator[None]:
    """The library's panics, which are no `Exception`, as `RuntimeError`: a call that ends with one has failed like any
    other."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        said = str(panic).strip().partition("\n")[0]
        raise RuntimeError(f"tiktoken panicked: {said:.200}") from panic


def is_mine(given: Any) -> bool:
    """Whether this is a `tiktoken.Encoding`."""
    return hasattr(given, "encode_ordinary") and hasattr(given, "_mergeable_ranks")


def from_object(given: Any) -> Loaded:
    """An encoding; it cannot change."""
    ranks, specials = given._mergeable_ranks, given._special_tokens
    nothing = digest([])
    identity = Identity(
        vocab_hash=digest(sorted((rank, token.hex()) for token, rank in ranks.items())),
        merges_hash=nothing,
        added_tokens_hash=nothing,
        normalizer_id=nothing,
        pretokenizer_id=digest(given._pat_str),
        special_tokens_hash=digest(specials),
    )
    return Loaded(Bpe(given), identity, frozenset({*ranks.values(), *specials.values()}))


def from_file(path: Path) -> Loaded:
    """Reads a file of ranks named after an encoding, e.g. `cl100k_base.tiktoken`: it holds no pattern of its own."""
    from tiktoken import Encoding

    from layerzero.backends.tiktoken.known import ENCODINGS

    if (known := ENCODINGS.get(path.stem)) is None:
        raise ValueError(
            f"a file of ranks has no pattern, and '{path.stem}' is none of the encodings whose pattern is known "
            f"({', '.join(ENCODINGS)}); make a tiktoken.Encoding and register it with lz.register_tokenizer"
        )
    pattern, specials = known
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if not ranks:
        raise ValueError("it holds no ranks")
    return from_object(Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials))


def encode(texts: list[str], tokenizer: Tokenizer, return_offsets: bool) -> Any:
    """Ids, or ids and offsets, of each text."""
    bpe: Bpe = tokenizer.libraries["tiktoken"]
    with panics():
        if len(texts) == 1:
            ids = [bpe.encode(texts[0])]
        elif sum(map(len, texts)) < _WORTH_THREADS:
            ids = [bpe.encode(text) for text in texts]
        else:
            with ThreadPoolExecutor(min(_MOST_THREADS, cpus(), len(texts))) as threads:
                ids = list(threads.map(bpe.encode, texts))
    if not return_offsets:
        return ids
    tokens = [bpe.encoding.decode_tokens_bytes(i) for i in ids]
    for at, (text, found) in enumerate(zip(texts, tokens, strict=True)):
        if b"".join(found) != text.encode():
            raise InvalidCallError(
                f"tokenize: the pattern of '{tokenizer.id}' passes over some of text {at}, and tiktoken does not say where",
                code="NO_OFFSETS",
                hint="tokenize it without return_offsets",
            )
    return ids, [_offsets(text, found) for text, found in zip(texts, tokens, strict=True)]


def cpus() -> int:
    """How many this process may use, where the system says; else how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _offsets(text: str, tokens: list[bytes]) -> list[tuple[int, int]]:
    """For each token the characters that it has a byte of."""
    # The character each byte belongs to.
    owner = [at for at, char in enumerate(text) for _ in range(len(char.encode()))]
    offsets, byte = [], 0
    for token in tokens:
        offsets.append((owner[byte], owner[byte + len(token) - 1] + 1))
        byte += len(token)
    return offsets


def decode(tokens: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of each list of ids."""
    bpe: Bpe = tokenizer.libraries["tiktoken"]
    with panics():
        return [bpe.decode(ids) for ids in tokens]


KERNELS: dict[str, Callable[..., Any]] = {"tiktoken.encode": encode, "tiktoken.decode": decode}
