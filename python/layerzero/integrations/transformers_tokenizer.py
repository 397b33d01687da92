"""transformers' tokenizers over `lz.tokenize`: the same class, the same results, the ids by the fastest library.

    from layerzero.integrations.transformers_tokenizer import from_pretrained, served

    tokenizer = from_pretrained("gpt2")            # or served(tokenizer), of one that you have
    tokenizer(["a text", "another"], padding=True, return_tensors="pt")

A tokenizer of transformers keeps a `tokenizers.Tokenizer`, which makes ids, cuts them, and pads them. A served tokenizer is a
copy whose `tokenizers.Tokenizer` is a :class:`Backend`: ids of single texts come from `lz.tokenize`, and are cut and padded
here. What is not made here (pairs, words that were split before, parts that were cut off, offsets) comes from the tokenizer's
own library, when it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from layerzero.errors import ArgumentTypeError, InvalidCallError
from layerzero.tokenization.api import detokenize, tokenize
from layerzero.tokenization.identity import digest
from layerzero.tokenization.resolving import register_tokenizer

__all__ = ["Backend", "Encoding", "from_pretrained", "served"]

Kind = TypeVar("Kind")

#: What transformers reads and sets between the calls, which changes no id of a text.
_HARMLESS = frozenset(
    [
        "decode",
        "decode_batch",
        "decoder",
        "enable_padding",
        "enable_truncation",
        "encode_special_tokens",
        "get_added_tokens_decoder",
        "get_vocab",
        "get_vocab_size",
        "id_to_token",
        "no_padding",
        "no_truncation",
        "num_special_tokens_to_add",
        "padding",
        "save",
        "to_str",
        "token_to_id",
        "truncation",
    ]
)
_PROBES = ("a", "0", "the", " ", "é", "中")


def from_pretrained(name: str, *args: Any, **kwargs: Any) -> Any:
    """``AutoTokenizer.from_pretrained`` with the same arguments, served by LayerZero."""
    from transformers import AutoTokenizer

    return served(AutoTokenizer.from_pretrained(name, *args, **kwargs))


def served(tokenizer: Kind) -> Kind:
    """A copy of a tokenizer of transformers whose ids come from `lz.tokenize`. Its class is the same.

    Args:
        tokenizer: one that is backed by the library `tokenizers` (``PreTrainedTokenizerFast``).
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "_tokenizer"):
        raise ArgumentTypeError(
            f"served: a {type(tokenizer).__name__} is no tokenizer of transformers that is backed by 'tokenizers'",
            code="NOT_A_TOKENIZER",
            hint="pass what AutoTokenizer.from_pretrained gives, and not use_fast=False",
        )
    made: Any = copy.deepcopy(tokenizer)
    if not isinstance(made._tokenizer, Backend):
        made._tokenizer = Backend(made._tokenizer)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Form:
    """How a tokenizer makes ids of one text: its id here, and what it puts before and after."""

    tokenizer_id: str
    before: list[int]
    after: list[int]


class Backend:
    """A `tokenizers.Tokenizer` whose batches of texts are encoded by LayerZero. Everything else is the tokenizer's own."""

    def __init__(self, own: Any) -> None:
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_form", None)
        object.__setattr__(self, "_known_as", None)
        object.__setattr__(self, "_is_same", False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_own":
            raise AttributeError(name)
        if name not in _HARMLESS:
            # Its parts can be changed from outside, and tokens can be added.
            object.__setattr__(self, "_is_same", False)
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HARMLESS:
            object.__setattr__(self, "_is_same", False)
        setattr(self._own, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return Backend(copy.deepcopy(self._own, memo))

    def __reduce__(self) -> Any:
        return Backend, (self._own,)

    def encode_batch(
        self, input: Sequence[Any], is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> list[Any]:
        """As `tokenizers.Tokenizer.encode_batch`."""
        texts = list(input)
        plain = not is_pretokenized and all(type(text) is str for text in texts)
        # Parts that are cut off overlap by a stride: they are asked for.
        simple = (
            plain and texts and not self._own.encode_special_tokens and not (self._own.truncation or {}).get("stride")
        )
        form = self._formed() if simple else None
        found = None if form is None else _ids(texts, form.tokenizer_id)
        if form is None or found is None:
            own: list[Any] = self._own.encode_batch(
                input, is_pretokenized=is_pretokenized, add_special_tokens=add_special_tokens
            )
            return own
        before, after = (form.before, form.after) if add_special_tokens else ([], [])
        cut = _Cut.of(self._own.truncation, len(before) + len(after))
        if cut is not None and cut.most < 0:
            own = self._own.encode_batch(texts, add_special_tokens=add_special_tokens)
            return own
        parts = found if cut is None else [cut.kept(ids) for ids in found]
        padding = self._own.padding
        length = _padded_length(padding, max(map(len, parts)) + len(before) + len(after))
        lazy = _Lazily(self._own, add_special_tokens, self._own.truncation, padding, length)
        return [
            Encoding(before, ids, after, padding, length, text, lazy) for text, ids in zip(texts, parts, strict=True)
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As `tokenizers.Tokenizer.decode`."""
        return self.decode_batch([ids], skip_special_tokens)[0]

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """As `tokenizers.Tokenizer.decode_batch`."""
        lists = [list(ids) for ids in sequences]
        form = self._formed() if skip_special_tokens and lists else None
        if form is not None:
            try:
                return detokenize(lists, form.tokenizer_id) if any(lists) else [""] * len(lists)
            except (InvalidCallError, ArgumentTypeError):
                # An id that it does not have: its own library says what that means.
                pass
        own: list[str] = self._own.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return own

    def _formed(self) -> _Form | None:
        """How it makes ids now; `None` where that is not one text after the other with the same tokens around each."""
        if not self._is_same:
            text = self._own.to_str()
            if text != self._known_as:
                object.__setattr__(self, "_form", _form_of(self._own, text))
                object.__setattr__(self, "_known_as", text)
            object.__setattr__(self, "_is_same", True)
        form: _Form | None = self._form
        return form


def _ids(texts: list[str], tokenizer_id: str) -> list[list[int]] | None:
    """The ids of texts; `None` for a text that is none, of which the tokenizer's own library says so."""
    try:
        ids: list[list[int]] = tokenize(texts, tokenizer_id)["input_ids"]
    except InvalidCallError:
        return None
    return ids


def _form_of(own: Any, text: str) -> _Form | None:
    whole = copy.deepcopy(own)
    whole.no_truncation()
    whole.no_padding()
    around = _around(whole)
    if around is None:
        return None
    name = f"transformers:{digest(text)}"
    bare = copy.deepcopy(whole)
    bare.post_processor = _without_tokens()
    register_tokenizer(name, bare)
    return _Form(name, *around)


def _around(whole: Any) -> tuple[list[int], list[int]] | None:
    """The ids that a tokenizer puts before and after a text; `None` where texts differ in them."""
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for text in _PROBES:
        bare, full = whole.encode(text, add_special_tokens=False), whole.encode(text)
        mask: list[int] = full.special_tokens_mask
        if not bare.ids or any(full.type_ids) or mask.count(0) != len(bare.ids):
            continue
        at = mask.index(0)
        if full.ids[at : at + len(bare.ids)] != bare.ids:
            return None
        seen.add((tuple(full.ids[:at]), tuple(full.ids[at + len(bare.ids) :])))
    if len(seen) != 1:
        return None
    before, after = seen.pop()
    return list(before), list(after)


def _without_tokens() -> Any:
    """A post-processor that adds nothing."""
    from tokenizers.processors import Sequence as Processors

    return Processors([])


@dataclass(frozen=True)
class _Cut:
    """How many ids of a text are kept, and on which side."""

    most: int
    from_left: bool

    @staticmethod
    def of(truncation: dict[str, Any] | None, around: int) -> _Cut | None:
        """Of the state of a `tokenizers.Tokenizer`. `around`: how many ids it adds."""
        if truncation is None:
            return None
        return _Cut(truncation["max_length"] - around, truncation["direction"] == "left")

    def kept(self, ids: list[int]) -> list[int]:
        """The ids that are kept."""
        if len(ids) <= self.most:
            return ids
        return ids[len(ids) - self.most :] if self.from_left else ids[: self.most]


def _padded_length(padding: dict[str, Any] | None, longest: int) -> int:
    """How long every sequence of a batch becomes; 0 without padding."""
    if padding is None:
        return 0
    length = longest if padding["length"] is None else int(padding["length"])
    step = padding["pad_to_multiple_of"]
    return length if not step else -(-length // step) * step


@dataclass(frozen=True)
class _Lazily:
    """The tokenizer's own library, in the state that a batch was encoded in."""

    own: Any
    add_special_tokens: bool
    truncation: dict[str, Any] | None
    padding: dict[str, Any] | None
    length: int

    def encoded(self, text: str) -> Any:
        """What it makes of a text."""
        own = copy.deepcopy(self.own)
        own.no_truncation()
        own.no_padding()
        if self.truncation is not None:
            own.enable_truncation(**self.truncation)
        if self.padding is not None:
            own.enable_padding(**{**self.padding, "length": self.length, "pad_to_multiple_of": None})
        return own.encode(text, add_special_tokens=self.add_special_tokens)


class Encoding:
    """A text as ids, with the attributes of `tokenizers.Encoding`. Those that need more than ids come from the tokenizer's own
    library."""

    n_sequences = 1

    def __init__(
        self,
        before: list[int],
        ids: list[int],
        after: list[int],
        padding: dict[str, Any] | None,
        length: int,
        text: str,
        lazy: _Lazily,
    ) -> None:
        whole = [*before, *ids, *after] if before or after else ids
        self.ids, self.attention_mask, self.type_ids = whole, [1] * len(whole), [0] * len(whole)
        self.special_tokens_mask = [1] * len(before) + [0] * len(ids) + [1] * len(after)
        missing = length - len(whole)
        if padding is not None and missing > 0:
            on_left = padding["direction"] == "left"

            def padded(values: list[int], filler: int) -> list[int]:
                return [filler] * missing + values if on_left else values + [filler] * missing

            self.ids = padded(whole, padding["pad_id"])
            self.attention_mask = padded(self.attention_mask, 0)
            self.type_ids = padded(self.type_ids, padding["pad_type_id"])
            self.special_tokens_mask = padded(self.special_tokens_mask, 1)
        self._text, self._lazy, self._encoded = text, lazy, None

    def __len__(self) -> int:
        return len(self.ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        encoded = self.__dict__.get("_encoded")
        if encoded is None:
            encoded = self._encoded = self._lazy.encoded(self._text)
        return getattr(encoded, name)

    def __reduce__(self) -> Any:
        # A process that unpickles it may not have LayerZero's tokenizer: what travels is the library's own.
        return copy.copy, (self._lazy.encoded(self._text),)
