"""Whether tiktoken gives the ids of a byte-level BPE of Hugging Face's tokenizers, and the encoding that does.

Three things decide the ids of such a tokenizer. What is shown of each:

*Merges.* tiktoken has no merges: it joins the two neighbours whose bytes together have the lowest rank. Let the merges
stand in the order of the ids they make, each part made before it is used, and let the library itself make every token
out of that token's own bytes. Then both give the same. For take the first join in which they could differ: neighbours
that together are the token t, after all joins of lower rank. No join ever crossed the borders of t here, or they would
not exist any more; so its inside is what it is when t stands alone. There the library makes t, so that just two parts are left by
then: the two it joins. Both join the same two. `_ranks` and `_reachable` check these conditions, for every token.

*Pieces.* Two regular expression engines, one pattern. Only patterns are taken of which `patterns` knows that both read them
alike. What they think of characters is compared by the pieces they cut: of every character among its neighbours, and of
those at both ends of every run of one category, as this Python's Unicode has them, among others.

*All else* (special tokens, what is put around a text, decoding): what is taken is listed; anything else is refused.

At last both libraries encode and decode hard texts and random ones. One difference, and tiktoken does not serve.
"""

from __future__ import annotations

import random
import unicodedata
from functools import cache
from itertools import pairwise
from typing import Any

from layerzero.backends.tiktoken import patterns
from layerzero.backends.tiktoken.adapter import Bpe, panics
from layerzero.backends.tiktoken.hard_texts import HARD


class Differs(Exception):
    """Why tiktoken does not serve a tokenizer."""


#: What the library cuts by when its pre-tokenizer says no more than `ByteLevel`, as tiktoken writes it.
_BYTE_LEVEL = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def build(document: dict[str, Any], native: Any) -> Bpe:
    """The encoding that gives the ids of this `tokenizer.json`, or `Differs`."""
    try:
        with panics():
            return _build(document, native)
    except Differs:
        raise
    # What was not foreseen (a key that is missing, a pattern tiktoken cannot read) shows nothing, and so does not count.
    except Exception as error:
        raise Differs(f"the attempt failed: {type(error).__name__}: {error}") from error


def _build(document: dict[str, Any], native: Any) -> Bpe:
    from tiktoken import Encoding

    _plain(document)
    pattern = _pattern(document["pre_tokenizer"])
    specials = _specials(document["added_tokens"])
    prefix, suffix = _around(document["post_processor"])
    ranks = _ranks(document["model"], specials)
    _reachable(document, native, specials)
    encoding = Encoding("proven", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    bpe = Bpe(
        encoding,
        frozenset(specials),
        prefix,
        suffix,
        frozenset(token["id"] for token in document["added_tokens"] if token["special"]),
        tuple(sorted({special[:2] for special in specials})),
    )
    tried = texts(list(specials), list(document["model"]["vocab"]))
    _pieces(pattern, native, [*tried, *_every_character()])
    _compare(bpe, native, list(specials), tried)
    return bpe


def _plain(document: dict[str, Any]) -> None:
    model = document["model"]
    if model["type"] != "BPE":
        raise Differs(f"its model is {model['type']}, tiktoken has BPE alone")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise Differs(f"its tokens have a {name.replace('_', ' ')}")
    if document["normalizer"] is not None:
        raise Differs(f"its normalizer is {document['normalizer']['type']}, tiktoken has none")
    if document.get("encode_special_tokens"):
        raise Differs("it takes special tokens in texts for text")
    if document["truncation"] is not None:
        raise Differs("it truncates texts")
    if (document["decoder"] or {}).get("type") != "ByteLevel":
        raise Differs("its decoder is not ByteLevel")


def _pattern(pre: dict[str, Any] | None) -> str:
    """What texts are cut by."""
    steps = (pre or {}).get("pretokenizers", [pre])
    *splits, last = steps
    if (last or {}).get("type") != "ByteLevel":
        raise Differs("its pre-tokenizer does not end with ByteLevel")
    if last["add_prefix_space"]:
        raise Differs("it puts a space before texts")
    if last["use_regex"] and not splits:
        return _BYTE_LEVEL
    if last["use_regex"] or len(splits) > 1 or any(split["type"] != "Split" for split in splits):
        raise Differs("its pre-tokenizer cuts more than once")
    if not splits:
        return r"[\s\S]+"
    split = splits[0]
    pattern = split["pattern"].get("Regex")
    if pattern is None:
        raise Differs("its pre-tokenizer splits by a text, not by a pattern")
    try:
        patterns.check(pattern)
    except patterns.Unclear as what:
        raise Differs(f"its pattern {pattern!r:.80} may be read differently: {what}") from what
    match split["behavior"], split["invert"]:
        case "Removed", True:
            return str(pattern)
        case "Isolated", False:
            # What lies between two matches is a piece as well; tiktoken would pass over it.
            return rf"{pattern}|(?:(?!{pattern})[\s\S])+"
    raise Differs(f"its pre-tokenizer splits by {split['behavior']}")


def _specials(added: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens that are looked for in texts before anything else."""
    specials = {token["content"]: token["id"] for token in added}
    for token in added:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise Differs(f"its added token {token['content']!r} is matched with {flag}")
        if not token["content"] or not token["content"].isascii():
            raise Differs(f"its added token {token['content']!r} is not made of ASCII")
    if len({token["normalized"] for token in added}) > 1:
        raise Differs("its added tokens are matched in two passes")
    names = sorted(specials)
    for one, other in pairwise(names):
        if other.startswith(one):
            raise Differs(f"its added token {other!r} begins with another one, {one!r}")
    return specials


def _around(post: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Ids that are put before and after those of a text."""
    steps = [post] if post is None or post["type"] != "Sequence" else post["processors"]
    prefix: list[int] = []
    suffix: list[int] = []
    for step in steps:
        if step is None or step["type"] == "ByteLevel":
            continue
        if step["type"] != "TemplateProcessing" or prefix or suffix:
            raise Differs(f"its post-processor is {step['type']}")
        into = prefix
        for piece in step["single"]:
            if "Sequence" in piece:
                into = suffix
            else:
                into += step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return prefix, suffix


@cache
def _bytes() -> dict[str, int]:
    """The characters byte-level tokens are written in: printable ones for themselves, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _ranks(model: dict[str, Any], specials: dict[str, int]) -> dict[bytes, int]:
    """tiktoken's vocabulary, if the merges are in the order of the ids they make and use only what is made before."""
    table, vocab = _bytes(), model["vocab"]
    made = set(table)
    if missing := made - vocab.keys():
        raise Differs(f"it has no token for the byte {table[min(missing)]:#04x}")
    last = -1
    for left, right in model["merges"]:
        token = left + right
        if left not in made or right not in made:
            raise Differs(f"its merge of {left!r} and {right!r} comes before both are made")
        if vocab[token] < last:
            raise Differs(f"its token {token!r} comes before that of an earlier merge")
        last = vocab[token]
        made.add(token)
    if extra := (vocab.keys() - made) - specials.keys():
        raise Differs(f"no merge makes its token {min(extra)!r}")
    return {bytes(map(table.__getitem__, token)): vocab[token] for token in made if token not in specials}


def _reachable(document: dict[str, Any], native: Any, specials: dict[str, int]) -> None:
    """Every token is what the library makes of its own bytes."""
    alone = native
    if document["model"]["ignore_merges"]:
        # Whole tokens are then looked up, as tiktoken does; the rest of the proof is about merges.
        alone = type(native).from_str(native.to_str())
        alone.model.ignore_merges = False
    model, vocab = alone.model, document["model"]["vocab"]
    for token, number in vocab.items():
        if token not in specials and [t.id for t in model.tokenize(token)] != [number]:
            raise Differs(f"its token {token!r} is not what its own bytes become")


@cache
def _ends_of_runs() -> list[str]:
    """The first and the last of neighbouring characters of one category, many that are not assigned, and a few that case
    folding joins."""
    found, category = [], ""
    for code in range(0x110000):
        now = unicodedata.category(chr(code))
        if now != category:
            found += [chr(code)] if not code else [chr(code - 1), chr(code)]
        # Not assigned as far as this Python knows; a library may know better.
        elif now == "Cn" and (code < 0x10000 or code < 0x20000 and code % 8 == 0 or code < 0x40000 and code % 256 == 0):
            found.append(chr(code))
        category = now
    return [char for char in dict.fromkeys([*found, *"ſKÅ", "\U0001f600", "\U000e0001", "\U0010ffff"]) if _valid(char)]


def _valid(char: str) -> bool:
    return not "\ud800" <= char <= "\udfff"


def texts(specials: list[str], vocab: list[str]) -> list[str]:
    """What both libraries are tried on: always the same for the same tokenizer."""
    draw = random.Random(0)
    chars = _ends_of_runs()
    by_class = ["".join(f"a{c}1{c} '{c}{c}'l{c}" for c in chars[i : i + 64]) for i in range(0, len(chars), 64)]
    table = _bytes()
    words = [
        bytes(table[c] for c in t).decode(errors="ignore")
        for t in draw.sample(vocab, min(len(vocab), 2000))
        if table.keys() >= set(t)
    ]
    pool = [*words, *chars[:200], *" \t\n\r'0129azAZé中😀", *specials[:20], *HARD]
    mixed = ["".join(draw.choices(pool, k=draw.randint(1, 24))) for _ in range(400)]
    around = [f"{a}{special}{b}" for special in specials[:64] for a, b in (("", ""), ("x ", " y"), (special, "\n"))]
    return [*HARD, *by_class, *mixed, *around]


@cache
def _every_character() -> list[str]:
    """All of the planes in which characters are assigned, in their order."""
    every = "".join(char for char in map(chr, (*range(0x34000), *range(0xE0000, 0xE0200))) if _valid(char))
    return [every[at : at + 1024] for at in range(0, len(every), 1024)]


def _pieces(pattern: str, native: Any, tried: list[str]) -> None:
    """Both cut texts at the same places.

    tiktoken does not tell where it cuts, but looks every piece up before it joins bytes. So it gets a vocabulary of the
    library's pieces, and of every two neighbours together. Where it cuts as the library does, it gives the pieces. Where
    it does not, take the first piece that is another. A shorter one ends where no piece does. So does a longer one,
    unless it is several pieces; and then the first two, left side by side, would have been joined.
    """
    from tiktoken import Encoding

    table, cut = _bytes(), native.pre_tokenizer.pre_tokenize_str
    pieces = [[bytes(map(table.__getitem__, piece)) for piece, _ in cut(text)] for text in tried]
    vocabulary = dict.fromkeys(bytes([byte]) for byte in range(256))
    for found in pieces:
        vocabulary |= dict.fromkeys(found) | dict.fromkeys(one + other for one, other in pairwise(found))
    ranks = {token: rank for rank, token in enumerate(vocabulary)}
    encoding = Encoding("pieces", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text, found in zip(tried, pieces, strict=True):
        if encoding.decode_tokens_bytes(encoding.encode_ordinary(text)) != found:
            raise Differs(f"it cuts {text!r:.60} at other places")


def _compare(bpe: Bpe, native: Any, specials: list[str], tried: list[str]) -> None:
    right = [encoding.ids for encoding in native.encode_batch_fast(tried)]
    for text, ids in zip(tried, right, strict=True):
        if bpe.encode(text) != ids:
            raise Differs(f"it gives other ids for {text!r:.60}")
    draw, known = random.Random(1), sorted(native.get_vocab(with_added_tokens=True).values())
    some = [draw.choices(known, k=draw.randint(1, 12)) for _ in range(400)]
    for ids in [*right, *some, *([i] for i in {native.token_to_id(special) for special in specials})]:
        if bpe.decode(ids) != native.decode(ids):
            raise Differs(f"it gives another text for {ids!r:.60}")
