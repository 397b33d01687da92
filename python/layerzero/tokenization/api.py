"""``lz.tokenize`` and ``lz.detokenize``, and the questions about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from layerzero import _native
from layerzero.errors import ArgumentTypeError, InvalidCallError
from layerzero.tokenization import remembering
from layerzero.tokenization.resolving import check_id, resolve
from layerzero.tokenization.tokenizer import Tokenizer

#: Every name of an operation on texts.
OPERATIONS = {
    "tokenize": "tokenize.encode",
    "tokenize.encode": "tokenize.encode",
    "detokenize": "tokenize.decode",
    "tokenize.decode": "tokenize.decode",
}


def tokenize(texts: str | Sequence[str], tokenizer_id: str, return_offsets: bool = False) -> dict[str, Any]:
    """The token ids of a text, or of each of several.

    Args:
        texts: a text, or a list of them.
        tokenizer_id: a registered id, a path (`tokenizer.json`, a SentencePiece `*.model`, a `*.tiktoken` file, or a
            directory with one of them), an encoding of tiktoken's, or a model in the local Hugging Face cache.
        return_offsets: also give for each token the characters it stands for, as ``(begin, end)``.

    Returns:
        ``{"input_ids": ...}``, a list of ids for a text and a list of lists for a list of texts, with ``"offsets"`` of the
        same form when they are asked for. The ids are those of the tokenizer's own library: the post-processor's special
        tokens included, no padding.
    """
    several = not isinstance(texts, str)
    given = _texts(texts)
    tokenizer = resolve(tokenizer_id) if isinstance(tokenizer_id, str) else _wrong_id(tokenizer_id)
    if not given:
        return {"input_ids": [], "offsets": []} if return_offsets else {"input_ids": []}
    longest = _longest(given)
    call = tokenizer.call("tokenize.encode", bool(return_offsets), longest)
    if return_offsets:
        ids, offsets = call.run(given, longest)
        return {"input_ids": ids, "offsets": offsets} if several else {"input_ids": ids[0], "offsets": offsets[0]}
    if (limit := _native.tokenizer_settings()[1]) > 0:
        ids = remembering.encode(tokenizer, given, limit)
    else:
        ids = call.run(given, longest)
    return {"input_ids": ids if several else ids[0]}


@overload
def detokenize(tokens: Sequence[int], tokenizer_id: str) -> str: ...
@overload
def detokenize(tokens: Sequence[Sequence[int]], tokenizer_id: str) -> list[str]: ...
def detokenize(tokens: Any, tokenizer_id: str) -> str | list[str]:
    """The text of token ids, or of each of several lists of them. An empty list gives the empty text.

    The text is that of the tokenizer's own library, which for Hugging Face's leaves special tokens out. Arrays and tensors
    of integers are taken as well. See `tokenize` for ``tokenizer_id``.
    """
    check_id(tokenizer_id)
    several, lists = _lists(tokens)
    tokenizer = resolve(tokenizer_id)
    for ids in lists:
        _check_ids(ids, tokenizer)
    if not lists:
        return []
    longest = _longest(lists)
    found: list[str] = tokenizer.call("tokenize.decode", False, longest).run(lists, longest)
    return found if several else found[0]


def _wrong_id(tokenizer_id: Any) -> Tokenizer:
    check_id(tokenizer_id)
    raise AssertionError("an id that is no text was refused")


def _longest(lists: Sequence[Sequence[Any]]) -> int:
    return max(len(lists[0]) if len(lists) == 1 else max(map(len, lists)), 1)


def _texts(texts: Any) -> list[str]:
    given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, list | tuple) else None
    if given is None:
        raise ArgumentTypeError(
            f"tokenize: 'texts' is a {type(texts).__name__}, expected a str or a list of them",
            code="NOT_A_TEXT",
            hint="decode bytes first, and pass other sequences as a list",
        )
    for at, text in enumerate(given):
        if not isinstance(text, str):
            raise ArgumentTypeError(
                f"tokenize: text {at} is {text!r:.80}, expected a str", code="NOT_A_TEXT", hint="pass texts alone"
            )
        if not text.isascii():
            _check_surrogates(text, at)
    return given


def _check_surrogates(text: str, at: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidCallError(
            f"tokenize: text {at} has half of a surrogate pair at {error.start} ({text[error.start]!r}), which is no "
            "character",
            code="LONE_SURROGATE",
            hint="text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') makes a text of it",
        ) from None


def _lists(tokens: Any) -> tuple[bool, list[list[int]]]:
    """Whether several lists were given, and the lists."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if not isinstance(tokens, list | tuple):
        raise _not_ids(tokens)
    if tokens and type(tokens[0]) is not int:
        tokens = [item.tolist() if hasattr(item, "tolist") else item for item in tokens]
    several = bool(tokens) and isinstance(tokens[0], list | tuple)
    lists = tokens if several else [tokens]
    for ids in lists:
        if not isinstance(ids, list | tuple):
            raise _not_ids(ids)
    return several, [list(ids) for ids in lists]


def _not_ids(found: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"detokenize: 'tokens' has {found!r:.80}, expected a list of ids, or a list of such lists",
        code="NOT_TOKENS",
        hint="pass what lz.tokenize gave as 'input_ids'",
    )


def _check_ids(ids: list[int], tokenizer: Tokenizer) -> None:
    if set(map(type, ids)) - {int}:
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise _not_ids(token)
            ids[at] = token.__index__()
    if not tokenizer.ids.issuperset(ids):
        at, token = next((at, token) for at, token in enumerate(ids) if token not in tokenizer.ids)
        raise InvalidCallError(
            f"detokenize: the tokenizer '{tokenizer.id}' has no token {token} (at {at})",
            code="UNKNOWN_TOKEN",
            hint="was it made by another tokenizer, or by a model whose vocabulary was padded?",
        )


# --- questions --------------------------------------------------------------------------------------------------------


def asked(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_native.TextCall, list[Any], int]:
    """The call that is asked about: what serves it, its texts, and the length of the longest."""

    def encode(texts: Any, tokenizer_id: str, return_offsets: bool = False) -> tuple[Any, str, bool]:
        return _texts(texts), tokenizer_id, bool(return_offsets)

    def decode(tokens: Any, tokenizer_id: str) -> tuple[Any, str, bool]:
        return _lists(tokens)[1], tokenizer_id, False

    operation = OPERATIONS[op]
    try:
        given, tokenizer_id, offsets = (encode if operation == "tokenize.encode" else decode)(*args, **kwargs)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(
            f"{op}: {error}", code="BAD_ARGUMENTS", hint="the arguments are the function's"
        ) from None
    check_id(tokenizer_id)
    given = given or [""]
    longest = _longest(given)
    return resolve(tokenizer_id).call(operation, offsets, longest), given, longest
