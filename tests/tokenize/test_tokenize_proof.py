"""tiktoken serves a tokenizer of Hugging Face's only where it gives the same ids; and what a tokenizer's identity is."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layerzero.backends.tiktoken import adapter as tiktoken_adapter
from layerzero.backends.tiktoken import known, proof
from layerzero.backends.tokenizers import adapter
from layerzero.tokenization.resolving import resolve
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

ISOLATED = {"behavior": "Isolated", "invert": False, "type": "Split"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def attempt(tokenizer: Any) -> str:
    """Why tiktoken does not serve it; empty when it does."""
    loaded = adapter.from_object(tokenizer)
    try:
        proof.build(loaded.document or {}, loaded.object)
    except proof.Differs as why:
        return str(why)
    return ""


def with_added(**flags: bool) -> Any:
    tokenizer = small.gpt2_like()
    tokenizer.add_tokens([AddedToken("<x>", **flags)])
    return tokenizer


def with_tokens(*tokens: str) -> Any:
    tokenizer = small.gpt2_like()
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


def with_part(name: str, part: Any) -> Any:
    tokenizer = small.gpt2_like()
    setattr(tokenizer, name, part)
    return tokenizer


def cut_by(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior, invert)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return with_part("pre_tokenizer", pre_tokenizers.Sequence([split, last]))


def without_a_byte() -> Any:
    data = json.loads(small.gpt2_like().to_str())
    vocab = data["model"]["vocab"]
    merges = [pair for pair in data["model"]["merges"] if "z" not in "".join(pair)]
    kept = {token: i for token, i in vocab.items() if "z" not in token}
    return small.changed(small.gpt2_like(), model_vocab=kept, model_merges=merges)


def with_an_unmade_token() -> Any:
    data = json.loads(small.gpt2_like().to_str())
    return small.changed(small.gpt2_like(), model_vocab={**data["model"]["vocab"], "qqqq": 5000})


def truncating() -> Any:
    tokenizer = small.gpt2_like()
    tokenizer.enable_truncation(8)
    return tokenizer


def specials_as_text() -> Any:
    tokenizer = small.gpt2_like()
    tokenizer.encode_special_tokens = True
    return tokenizer


REFUSED = {
    "it takes special tokens in texts for text": specials_as_text,
    "its model is WordLevel": small.word_level,
    "its normalizer is NFC": lambda: with_part("normalizer", normalizers.NFC()),
    "its decoder is not ByteLevel": lambda: with_part("decoder", decoders.WordPiece()),
    "it truncates": truncating,
    "puts a space before": lambda: with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "does not end with ByteLevel": lambda: with_part("pre_tokenizer", pre_tokenizers.Whitespace()),
    "cuts more than once": lambda: with_part(
        "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    ),
    "splits by MergedWithNext": lambda: cut_by(r"\s+|\S+", "merged_with_next"),
    "may be read differently": lambda: cut_by(r"^\w+|.$"),
    "matched with lstrip": lambda: with_added(lstrip=True),
    "matched with rstrip": lambda: with_added(rstrip=True),
    "matched with single_word": lambda: with_added(single_word=True),
    "matched in two passes": lambda: with_added(normalized=True),
    "begins with another one": lambda: with_tokens("<a", "<a>"),
    "not made of ASCII": lambda: with_tokens("<é>"),
    "its post-processor is BertProcessing": lambda: with_part(
        "post_processor", processors.BertProcessing(("!", 0), ("?", 30))
    ),
    "no token for the byte 0x7a": without_a_byte,
    "no merge makes its token 'qqqq'": with_an_unmade_token,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_tiktoken_does_not_do(why: str) -> None:
    assert why in attempt(REFUSED[why]())


TAKEN = {
    "gpt2": small.gpt2_like,
    "llama3": small.llama3_like,
    "looked up whole": lambda: small.changed(small.llama3_like(), model_ignore_merges=True),
    "not cut": lambda: with_part("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    # What no alternative matches is a piece for the one, and nothing for the other.
    "gaps": lambda: cut_by(r"\p{L}+"),
    "gaps that are dropped": lambda: cut_by(r" ?\p{L}+|\p{N}{2}", "removed", True),
    "many special tokens": lambda: with_tokens("<|a|>", "<|b|>", "[x]", "a b"),
    "around": lambda: with_part(
        "post_processor",
        processors.TemplateProcessing(single="! ! $A ?", special_tokens=[("!", 0), ("?", 30)]),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
@given(data=st.data())
@settings(max_examples=25)
def test_what_it_does(name: str, data: st.DataObject) -> None:
    tokenizer = TAKEN[name]()
    if name not in _built:
        loaded = adapter.from_object(tokenizer)
        _built[name] = proof.build(loaded.document or {}, loaded.object)
    text = data.draw(st.text() | st.text("ab 12é\n'<|>xs") | st.sampled_from(proof.HARD))
    ids = tokenizer.encode(text).ids
    assert _built[name].encode(text) == ids
    assert _built[name].decode(ids) == tokenizer.decode(ids)


_built: dict[str, tiktoken_adapter.Bpe] = {}


@st.composite
def merges_of_three_letters(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges of what was made before them, in any order and for any token more than once."""
    made, merges = ["a", "b", "c"], []
    for _ in range(draw(st.integers(1, 9))):
        pair = (draw(st.sampled_from(made)), draw(st.sampled_from(made)))
        if pair not in merges and sum(map(len, pair)) <= 6:
            merges.append(pair)
            made.append("".join(pair))
    return merges


WORDS = ["".join(letters) for length in range(1, 8) for letters in product("abc", repeat=length)]


@given(merges=merges_of_three_letters())
@example(merges=[("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("ab", "ab")])
@settings(max_examples=60)
def test_what_is_said_of_merges(merges: list[tuple[str, str]]) -> None:
    """Whatever merges the two checks let pass give the same as BPE by its definition, on every word of three letters."""
    made = dict.fromkeys(a + b for a, b in merges)
    # A token may be made in two ways only where both merges stand together.
    merges.sort(key=lambda pair: list(made).index("".join(pair)))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *made])}
    tokenizer = small.changed(small.gpt2_like(), model_vocab=vocab, model_merges=merges, added_tokens=[])
    loaded = adapter.from_object(tokenizer)
    assert loaded.document is not None
    try:
        ranks = proof._ranks(loaded.document["model"], {})
        proof._reachable(loaded.document, loaded.object, {})
    except proof.Differs:
        return
    encoding = small.tiktoken.Encoding("x", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    order = {pair: i for i, pair in enumerate(merges)}
    for word in WORDS:
        assert encoding.encode_ordinary(word) == small.merged(order, list(word), vocab), word


def test_a_join_the_library_would_not_make_is_found() -> None:
    """`abc` is made of `ab` and `c`; tiktoken would make it of `a` and `bc` as well."""
    letters = list(pre_tokenizers.ByteLevel.alphabet())
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    vocab = {token: i for i, token in enumerate([*sorted(letters), "bc", "ab", "abc"])}
    tokenizer = small.changed(small.gpt2_like(), model_vocab=vocab, model_merges=merges, added_tokens=[])
    assert tokenizer.encode("abc").tokens == ["a", "bc"]
    assert "'abc' is not what its own bytes become" in attempt(tokenizer)


def test_a_difference_the_checks_missed_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_BYTE_LEVEL", proof._BYTE_LEVEL.replace(r"\p{N}++", r"\p{N}{1,2}"))
    assert "at other places" in attempt(small.gpt2_like())


def test_why_not_is_in_the_explanation() -> None:
    lz.register_tokenizer("normalizing", with_part("normalizer", normalizers.NFC()))
    lz.register_tokenizer("encoding", small.encoding())
    report = lz.explain("tokenize", "a", "normalizing")
    assert report.chosen == "tokenizers.encode"
    reasons = {c.kernel_id: [str(r) for r in c.reasons] for c in report.candidates}
    assert any("its normalizer is NFC" in reason for reason in reasons["tiktoken.encode"])
    valid, why = lz.validate("tiktoken.decode", [1], "normalizing")
    assert not valid and "NFC" in why[0].message
    with pytest.raises(lz.NoKernelFoundError, match="NFC"):
        lz.run_kernel("tiktoken.encode", "a", "normalizing")
    assert lz.which("tokenize", "a", "encoding").kernel_id == "tiktoken.encode"


def test_patterns_of_known_encodings_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken_ext.openai_public as public

    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
    for name, (pattern, specials) in known.ENCODINGS.items():
        made = getattr(public, name)()
        assert (made["pat_str"], made["special_tokens"]) == (pattern, specials)


# --- identity ---------------------------------------------------------------------------------------------------------


def identity(tokenizer: Any) -> dict[str, str]:
    return adapter.from_object(tokenizer).identity.parameters()


def swapped_vocab() -> Any:
    data = json.loads(small.gpt2_like().to_str())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return small.changed(small.gpt2_like(), model_vocab=vocab)


def fewer_merges() -> Any:
    merges = json.loads(small.gpt2_like().to_str())["model"]["merges"]
    return small.changed(small.gpt2_like(), model_merges=merges[:-1])


CHANGES: dict[str, tuple[Any, set[str]]] = {
    "vocabulary": (swapped_vocab, {"vocab_hash"}),
    "model": (lambda: small.changed(small.gpt2_like(), model_ignore_merges=True), {"vocab_hash"}),
    "merges": (fewer_merges, {"merges_hash"}),
    "added token": (lambda: with_added(), {"added_tokens_hash"}),
    "flag of an added token": (lambda: with_added(lstrip=True), {"added_tokens_hash"}),
    "special token": (lambda: with_tokens("<x>"), {"added_tokens_hash", "special_tokens_hash"}),
    "normalizer": (lambda: with_part("normalizer", normalizers.NFC()), {"normalizer_id"}),
    "another normalizer": (lambda: with_part("normalizer", normalizers.NFKC()), {"normalizer_id"}),
    "pre-tokenizer": (lambda: cut_by(r"\S+"), {"pretokenizer_id"}),
    "pattern": (lambda: cut_by(r"\S"), {"pretokenizer_id"}),
    "decoder": (lambda: with_part("decoder", decoders.WordPiece()), {"pretokenizer_id"}),
    "post-processor": (TAKEN["around"], {"special_tokens_hash"}),
    "truncation": (truncating, {"special_tokens_hash"}),
    "special tokens as text": (specials_as_text, {"special_tokens_hash"}),
}


def test_every_part_changes_its_hash_and_no_other() -> None:
    plain = identity(small.gpt2_like())
    assert plain == identity(small.gpt2_like())
    assert all(len(value) == 64 and int(value, 16) >= 0 for value in plain.values())
    seen = {json.dumps(plain)}
    for name, (make, parts) in CHANGES.items():
        found = identity(make())
        assert {part for part in plain if plain[part] != found[part]} == parts, name
        seen.add(json.dumps(found))
    assert len(seen) == len(CHANGES) + 1


def test_identity_of_the_other_libraries() -> None:
    from layerzero.backends.sentencepiece import adapter as pieces

    def encoding(**parts: Any) -> str:
        whole = {"pat_str": r"\S+|\s+", "mergeable_ranks": small.ranks(), "special_tokens": {small.END: 300}} | parts
        return tiktoken_adapter.from_object(small.tiktoken.Encoding("x", **whole)).identity.hash

    swapped = small.ranks() | {b"he": 257, b"ll": 256}
    encodings = [
        encoding(),
        encoding(pat_str=r"\S+|\s"),
        encoding(special_tokens={small.END: 301}),
        encoding(special_tokens={}),
        encoding(mergeable_ranks=swapped),
    ]
    assert len(set(encodings)) == 5 and encoding() == encodings[0]
    bpe = small.sentencepiece.SentencePieceProcessor(model_proto=small.sentencepiece_model("bpe"))
    made = [small.processor(), bpe, *(small.processor(**{o: True}) for o in ("add_bos", "add_eos", "reverse"))]
    assert len({pieces.from_object(p).identity.hash for p in made}) == 5


def test_identity_is_in_the_query() -> None:
    """Rules, which see the query, may look at it."""
    lz.register_tokenizer("ruled", small.gpt2_like())
    tokenizer = resolve("ruled")
    assert tokenizer.namespace == f"ruled:{tokenizer.identity.hash}"

    @lz.register_kernel(
        operation="tokenize.encode",
        kernel_id="mine.encode",
        platform="cpu",
        supported_dtypes=[],
        priority=100,
        vocab_hashes=[tokenizer.identity.vocab_hash],
        tokenizer_ids=["ruled"],
    )
    def mine(texts: list[str], tokenizer: Any) -> list[list[int]]:
        return [tokenizer.libraries["tokenizers"].encode(text).ids for text in texts]

    try:
        assert lz.which("tokenize", "a", "ruled").kernel_id == "mine.encode"
        assert lz.tokenize("hello", "ruled")["input_ids"] == small.gpt2_like().encode("hello").ids
        lz.register_tokenizer("ruled", swapped_vocab())
        valid, why = lz.validate("mine.encode", "a", "ruled")
        assert not valid and why[0].code == "VOCAB_HASH_MISMATCH"
        lz.register_tokenizer("other", small.gpt2_like())
        valid, why = lz.validate("mine.encode", "a", "other")
        assert not valid and why[0].code == "TOKENIZER_ID_MISMATCH"
        assert not lz.validate("mine.encode", "a", "ruled", return_offsets=True)[0]
    finally:
        lz.unregister_kernel("mine.encode")
