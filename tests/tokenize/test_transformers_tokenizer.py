"""A tokenizer of transformers over `lz.tokenize` gives what the tokenizer itself gives, whatever it is asked."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from hypothesis import given
from hypothesis import strategies as st
from layerzero.integrations import transformers_tokenizer
from layerzero.integrations.transformers_tokenizer import Backend, Encoding, from_pretrained, served
from layerzero.tokenization import resolving
from strategies import examples
from tokenizers import processors

transformers = pytest.importorskip("transformers")

TEXTS = st.one_of(
    st.text(max_size=30),
    st.text("abc xyz'\n\t123.é中😀", max_size=30),
    st.lists(st.sampled_from([small.END, small.START, "hello", " world", "  ", "\n\n", "don't", "é"]), max_size=8).map(
        "".join
    ),
)
KINDS = ("gpt2", "llama3", "words", "around")
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    """What is registered here is forgotten afterwards."""
    before = dict(resolving._known)
    yield
    resolving._known.clear()
    resolving._known.update(before)


def backend(kind: str) -> Any:
    """A small tokenizer of the library."""
    if kind == "words":
        return small.word_level()
    if kind == "llama3":
        return small.llama3_like()
    made = small.gpt2_like()
    if kind == "around":
        start, end = made.token_to_id(small.START), made.token_to_id(small.END)
        if start is None:
            start = end
        around = [("[B]", start), ("[E]", end)]
        made.post_processor = processors.TemplateProcessing(
            single="[B] $A [E] [E]", pair="[B] $A [E] $B:1 [E]:1", special_tokens=around
        )
    return made


@cache
def pair(kind: str) -> tuple[Any, Any]:
    """A tokenizer of transformers, and the same served by LayerZero."""
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(kind), pad_token=small.END, eos_token=small.END)
    own.chat_template = CHAT
    return own, served(own)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """How a tokenizer is called."""
    chosen: dict[str, Any] = {
        "padding": draw(st.sampled_from([False, True, "max_length", "longest"])),
        "truncation": draw(st.booleans()),
        "max_length": draw(st.one_of(st.none(), st.integers(4, 20))),
        "add_special_tokens": draw(st.booleans()),
        "pad_to_multiple_of": draw(st.sampled_from([None, 4])),
        "padding_side": draw(st.sampled_from([None, "left", "right"])),
        "return_token_type_ids": draw(st.sampled_from([None, True])),
        "return_attention_mask": draw(st.sampled_from([None, False])),
        "return_special_tokens_mask": draw(st.booleans()),
        "return_offsets_mapping": draw(st.booleans()),
        "return_length": draw(st.booleans()),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def answer(call: Any) -> Any:
    """What a call gives, or how it refuses."""
    try:
        found = call()
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return type(error), str(error)
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_it_gives_what_the_tokenizer_gives(kind: str) -> None:
    own, ours = pair(kind)

    @given(st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=4)), options(), st.sampled_from(["left", "right"]))
    @examples(60)
    def check(texts: Any, given_options: dict[str, Any], side: str) -> None:
        own.truncation_side = ours.truncation_side = side
        assert answer(lambda: ours(texts, **given_options)) == answer(lambda: own(texts, **given_options))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_ids_too(kind: str) -> None:
    own, ours = pair(kind)

    @given(st.lists(st.lists(st.integers(0, own.vocab_size + 3), max_size=12), min_size=1, max_size=3), st.booleans())
    @examples(40)
    def check(ids: list[list[int]], skip: bool) -> None:
        expected = own.batch_decode(ids, skip_special_tokens=skip)
        assert ours.batch_decode(ids, skip_special_tokens=skip) == expected
        assert [ours.decode(one, skip_special_tokens=skip) for one in ids] == expected

    check()


def test_ids_come_from_layerzero(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ours = pair("around")
    asked: list[list[str]] = []
    real = transformers_tokenizer.tokenize

    def noted(texts: Any, tokenizer_id: str) -> Any:
        asked.append(texts)
        return real(texts, tokenizer_id)

    monkeypatch.setattr(transformers_tokenizer, "tokenize", noted)
    assert ours(["one", "two three"]).input_ids == own(["one", "two three"]).input_ids
    assert ours("four")["input_ids"] == own("four")["input_ids"]
    assert asked == [["one", "two three"], ["four"]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_made_here_is_the_librarys(kind: str) -> None:
    own, ours = pair(kind)
    texts = ["hello world don't", "é 123"]
    calls: list[Any] = [
        lambda t: t("hello", "world"),
        lambda t: t(texts, texts, padding=True),
        lambda t: t([["hello", "world"]], is_split_into_words=True),
        lambda t: t(texts, truncation=True, max_length=6, stride=1, return_overflowing_tokens=True),
        lambda t: t(texts, split_special_tokens=True),
        lambda t: t([""], padding=True),
    ]
    for call in calls:
        assert answer(lambda call=call: call(ours)) == answer(lambda call=call: call(own))
    for tokenizer in (own, ours):
        assert tokenizer(texts).word_ids(0) == own(texts).word_ids(0)
        assert tokenizer(texts, padding=True).tokens(1) == own(texts, padding=True).tokens(1)
        assert tokenizer(texts).char_to_token(0, 7) == own(texts).char_to_token(0, 7)


def test_chats_and_tensors() -> None:
    own, ours = pair("llama3")
    chat = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "don't"}]
    expected = own.apply_chat_template(chat, tokenize=True, return_dict=True)
    assert ours.apply_chat_template(chat, tokenize=True, return_dict=True).input_ids == expected.input_ids
    assert ours.apply_chat_template(chat, tokenize=False) == own.apply_chat_template(chat, tokenize=False)
    tensors = ours(["a", "hello world"], padding=True, return_tensors="pt")
    assert tensors.input_ids.equal(own(["a", "hello world"], padding=True, return_tensors="pt").input_ids)


def test_tokens_that_are_added_later_are_known() -> None:
    own, ours = (copy.deepcopy(tokenizer) for tokenizer in pair("gpt2"))
    assert isinstance(ours._tokenizer, Backend)
    before = ours("a<new>b").input_ids
    for tokenizer in (own, ours):
        tokenizer.add_tokens(["<new>"])
    assert ours("a<new>b").input_ids == own("a<new>b").input_ids != before
    for tokenizer in (own, ours):
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    assert ours("hello").input_ids == own("hello").input_ids


def test_it_is_saved_and_loaded_as_what_it_is(tmp_path: Path) -> None:
    own, ours = pair("around")
    assert type(ours) is type(own)
    ours.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path))
    assert isinstance(loaded._tokenizer, Backend)
    assert loaded("hello world").input_ids == own("hello world").input_ids
    again = pickle.loads(pickle.dumps(ours))
    assert isinstance(again._tokenizer, Backend)
    assert again("hello world").input_ids == own("hello world").input_ids
    assert served(ours)("hello").input_ids == own("hello").input_ids
    encoding = ours("hello")._encodings[0]
    assert isinstance(encoding, Encoding)
    assert pickle.loads(pickle.dumps(encoding)).ids == encoding.ids


def test_switched_off_it_is_the_tokenizers_own_library() -> None:
    own, ours = pair("gpt2")
    with lz.disabled():
        assert ours(["hello world", "x"], padding=True).input_ids == own(["hello world", "x"], padding=True).input_ids


def test_what_is_no_such_tokenizer_is_refused() -> None:
    with pytest.raises(lz.ArgumentTypeError, match="a Tokenizer is no tokenizer of transformers"):
        served(backend("gpt2"))
