"""Ids of texts seen before. What is remembered is one tokenizer's, by its id and hash, and is checked now and then."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict

from layerzero.errors import warn
from layerzero.events import logger
from layerzero.lifecycle import open_in_forks
from layerzero.tokenization.tokenizer import Tokenizer

#: Of so many hits, one in so many is checked (specification 000 §I.8); after them one in the last.
RATES = ((100, 10), (1000, 100), (0, 1000))

_OVERHEAD = 200
"""Bytes an entry takes besides its text and ids."""


def is_checked(hit: int) -> bool:
    """Whether the hit of this number, from 1, is compared with what the tokenizer gives."""
    for count, one_in in RATES:
        if not count or hit <= count:
            return hit % one_in == 0
        hit -= count
    return False


class Remembered:
    """Texts and their ids, by tokenizer, the longest unused forgotten first. For many threads."""

    def __init__(self) -> None:
        self._lock = open_in_forks(threading.Lock())
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._hits: dict[str, int] = {}
        self._off: set[str] = set()
        self.bytes = 0

    def find(self, namespace: str, texts: list[str]) -> tuple[list[list[int] | None], list[int]]:
        """For each text its ids, where they are known; and which of them are to be checked."""
        found: list[list[int] | None] = []
        checked = []
        with self._lock:
            for at, text in enumerate(texts):
                known = self._ids.get((namespace, text))
                if known is None:
                    found.append(None)
                    continue
                self._ids.move_to_end((namespace, text))
                hits = self._hits[namespace] = self._hits.get(namespace, 0) + 1
                if is_checked(hits):
                    checked.append(at)
                found.append(known.tolist())
        return found, checked

    def keep(self, namespace: str, text: str, ids: list[int], limit: int) -> None:
        """Remembers the ids of a text."""
        packed = array("I", ids)
        size = _size(text, packed)
        with self._lock:
            if namespace in self._off or size > limit:
                return
            before = self._ids.pop((namespace, text), None)
            self.bytes += size - (_size(text, before) if before is not None else 0)
            self._ids[namespace, text] = packed
            while self.bytes > limit:
                (_, oldest), old = self._ids.popitem(last=False)
                self.bytes -= _size(oldest, old)

    def is_off(self, namespace: str) -> bool:
        """Whether nothing of this tokenizer is remembered any more."""
        return namespace in self._off

    def turn_off(self, namespace: str) -> None:
        """Forgets a tokenizer's texts, and remembers none from now on."""
        with self._lock:
            self._off.add(namespace)
            for key in [key for key in self._ids if key[0] == namespace]:
                self.bytes -= _size(key[1], self._ids.pop(key))

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._ids.clear()
            self._hits.clear()
            self._off.clear()
            self.bytes = 0


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + _OVERHEAD


REMEMBERED = Remembered()


def encode(tokenizer: Tokenizer, texts: list[str], limit: int) -> list[list[int]]:
    """The ids of texts, those that are not known from the tokenizer."""
    longest = max(max(map(len, texts)), 1)
    call, namespace = tokenizer.call("tokenize.encode", False, longest), tokenizer.namespace
    if REMEMBERED.is_off(namespace):
        ids: list[list[int]] = call.run(texts, longest)
        return ids
    found, checked = REMEMBERED.find(namespace, texts)
    missing = [at for at, known in enumerate(found) if known is None]
    asked = [*missing, *checked]
    if asked:
        fresh = call.run([texts[at] for at in asked], longest)
        for at, ids_now in zip(asked, fresh, strict=True):
            if found[at] is None:
                REMEMBERED.keep(namespace, texts[at], ids_now, limit)
            elif found[at] != ids_now:
                _distrust(tokenizer, texts[at])
            found[at] = ids_now
    return [known for known in found if known is not None]


def _distrust(tokenizer: Tokenizer, text: str) -> None:
    REMEMBERED.turn_off(tokenizer.namespace)
    said = f"the ids remembered for a text of {len(text)} characters are not those the tokenizer '{tokenizer.id}' gives"
    fields = {"event": "tokenizer_cache_mismatch", "tokenizer_id": tokenizer.id, "hash": tokenizer.identity.hash}
    logger.error("%s", said, extra={"event": "tokenizer_cache_mismatch", "layerzero": fields})
    warn(f"{said}: its texts are no longer remembered in this process")
