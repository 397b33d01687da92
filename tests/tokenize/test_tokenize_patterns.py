"""Patterns tiktoken is given: those both engines read alike, and where both cut texts at the same places."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from layerzero.backends.tiktoken import known, patterns, proof
from layerzero.backends.tokenizers import adapter
from test_tokenize_proof import attempt, cut_by

GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
READ_ALIKE = {
    "gpt-2": GPT_2,
    "gpt-2, written out": GPT_2.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d"),
    "llama 3": small.LLAMA_3,
    "qwen": small.LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "o200k": known._O200K,
    "scripts": r"[\p{Han}\p{Hiragana}]+|[^\p{Han}\p{Hiragana}]",
}


@pytest.mark.parametrize("name", READ_ALIKE)
def test_patterns_in_use_are_taken(name: str) -> None:
    assert attempt(cut_by(READ_ALIKE[name])) == ""


UNCLEAR = [
    # The engines were seen to differ on these.
    r"\p{Word}+|\P{Word}+",
    r"\p{Print}+|\P{Print}+",
    r"(?i:\p{Lu})+|\P{Lu}+",
    r"(?i:'s|'ffi)|[^\s]|\s",
    r"(?i:'s|'ss)|[^\s]|\s",
    r"[a-z]{3}?₿x|[\s\S]",
    # tiktoken panics on what can match nothing.
    r"\p{L}*|\s+",
    r"q?",
    r"a|",
    r"(?=z)|\s+",
    r"(?:a?|b)",
    "",
    # What nobody has compared.
    *(
        r"(?i)a",
        r"(?i:st)",
        r"(?i:a)",
        r"(a?)+b",
        r"(?=a)+b",
        r"a**",
        r"a+*",
        r"a{2}{3}",
        r"a{2}+",
        r"a{2,1}",
        r"a{,2}b",
    ),
    *(r"^a", r"a$", r"a.b", r"\<a", r"\ba", r"\w", r"\d", r"(?<=a)b", r"(?<n>a)", r"(a)\1", r"\p{^L}", r"\p{Cn}"),
    *(r"[]a]", r"[a-\s]", r"[[:alpha:]]", r"[a&&b]", r"[a--b]", r"[a~~b]", r"[[a]b]", r"(a", r"a)", r"[a", "\\"),
]


@pytest.mark.parametrize("pattern", UNCLEAR)
def test_what_may_be_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(patterns.Unclear):
        patterns.check(pattern)


@pytest.mark.parametrize("pattern", [r"\p{L}*|\s+", r"q?", r"a|", r"(?=z)|\s+", r"\p{Word}+|\P{Word}+"])
def test_such_a_tokenizer_is_its_own_librarys(pattern: str) -> None:
    made = cut_by(pattern)
    lz.register_tokenizer("unclear", made)
    text = "hello क\u200d wörld 12"
    assert lz.which("tokenize", text, "unclear").kernel_id == "tokenizers.encode"
    assert lz.tokenize(text, "unclear")["input_ids"] == made.encode(text).ids


def test_a_panic_in_the_attempt_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "check", lambda _: None)
    assert "tiktoken panicked" in attempt(cut_by(r"\p{L}*|\s+"))


def other_letters(monkeypatch: pytest.MonkeyPatch, *chars: str) -> None:
    """tiktoken takes these for letters, as an engine of another Unicode would."""
    more = "".join(chars)
    pattern = proof._BYTE_LEVEL.replace(r"\p{L}++", rf"[\p{{L}}{more}]++")
    monkeypatch.setattr(proof, "_BYTE_LEVEL", pattern.replace(r"[^\s\p{L}\p{N}]", rf"[^\s\p{{L}}\p{{N}}{more}]"))


@pytest.mark.parametrize("code", [0x0301, 0x0378, 0x2028, 0x2603, 0x1F602, 0xE0001, 0x1ABCD, 0x33479])
def test_one_character_that_is_taken_for_another_is_seen(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other_letters(monkeypatch, chr(code))
    assert "at other places" in attempt(small.gpt2_like())


@pytest.mark.parametrize(
    ("library", "other"),
    [
        (r"a|b", r"ab|a|b"),
        (r"aa|b", r"aab|aa|b"),
        (r"abc|ab|c|d", r"abcd|abc"),
        (r"a|b|c|d", r"abcd|a"),
        (r"[ab]+", r"[ab]"),
        (r"ab|cd", r"abc|d"),
    ],
)
def test_pieces_that_are_cut_elsewhere_are_seen(library: str, other: str) -> None:
    """Also where the vocabulary has the library's pieces, so that joining bytes would give them too."""
    made: Any = adapter.from_object(cut_by(f"{library}|[\\s\\S]")).object
    tried = ["abcd", "aab", "ab", "abcdabcd", "cdab"]
    proof._pieces(f"{library}|[\\s\\S]", made, tried)
    with pytest.raises(proof.Differs, match="at other places"):
        proof._pieces(f"{other}|[\\s\\S]", made, tried)
