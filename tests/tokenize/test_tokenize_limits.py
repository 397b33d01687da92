"""Where a library gives up, what differs from one system to the next, and what objects and files hold besides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from layerzero.backends.tiktoken import adapter
from layerzero.tokenization import tokenizer as limits
from layerzero.tokenization.resolving import resolve

#: More than tiktoken's engine has steps for.
TOO_LONG = " " * 1_100_000 + "x"


class PanicException(BaseException):
    """As the libraries' own: no `Exception`."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """A tokenizer two libraries can serve, and one of tiktoken's own."""
    lz.register_tokenizer("llama3", small.llama3_like())
    lz.register_tokenizer("encoding", small.encoding())
    yield
    lz.reset()
    lz.forget_failures()


@pytest.mark.filterwarnings("error::layerzero.LayerZeroWarning")
def test_texts_that_are_too_long_for_tiktoken_go_to_the_tokenizers_own() -> None:
    most = limits.LONGEST_FOR_TIKTOKEN
    assert lz.which("tokenize", "x" * most, "llama3").kernel_id == "tiktoken.encode"
    for texts in ("x" * (most + 1), ["x", "x" * (most + 1)]):
        assert lz.which("tokenize", texts, "llama3").kernel_id == "tokenizers.encode"
    wanted = small.llama3_like().encode(TOO_LONG).ids
    assert lz.tokenize(TOO_LONG, "llama3")["input_ids"] == wanted
    assert lz.tokenize(["x", TOO_LONG], "llama3")["input_ids"][1] == wanted
    lz.configure(tokenizer={"cache_mb": 64})
    assert lz.tokenize(TOO_LONG, "llama3")["input_ids"] == wanted
    # What it gives is right by definition for its own encodings, however long.
    assert lz.which("tokenize", "x" * (most + 1), "encoding").kernel_id == "tiktoken.encode"
    assert lz.which("detokenize", [1] * (most + 1), "llama3").kernel_id == "tiktoken.decode"


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("many", [False, True])
def test_a_panic_is_a_failure_like_any_other(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONGEST_FOR_TIKTOKEN", 1 << 40)
    texts: Any = [TOO_LONG, "x"] if many else TOO_LONG
    made = small.llama3_like()
    wanted = [made.encode(text).ids for text in texts] if many else made.encode(texts).ids
    assert lz.tokenize(texts, "llama3")["input_ids"] == wanted
    assert "panicked" in lz.health().kernels["tiktoken.encode"]["last_error"]["message"]


def test_a_panic_where_nobody_else_serves_is_an_error() -> None:
    with pytest.raises(lz.KernelExecutionError, match="tiktoken panicked"):
        lz.tokenize(" " * 2_000_000 + "x", "encoding")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, PanicException])
@pytest.mark.parametrize("op", ["encode", "decode"])
def test_only_panics_are_turned(op: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def encode(self, _: str) -> list[int]:
            raise error("stopped")

        decode = encode

    monkeypatch.setitem(resolve("llama3").libraries, "tiktoken", Broken())
    kernel, given = (adapter.encode, ["x"]) if op == "encode" else (adapter.decode, [[1]])
    wanted = RuntimeError if error is PanicException else error
    with pytest.raises(wanted, match="stopped"):
        kernel(given, resolve("llama3"), False) if op == "encode" else kernel(given, resolve("llama3"))


def test_systems_that_do_not_say_how_many_processors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(adapter, "_WORTH_THREADS", 1)
    for count in (None, 3):
        monkeypatch.setattr(os, "cpu_count", lambda found=count: found)
        texts = ["hello", "world"]
        wanted = [small.llama3_like().encode(text).ids for text in texts]
        assert lz.run_kernel("tiktoken.encode", texts, "llama3") == wanted


@pytest.mark.parametrize("fast", [False, True])
def test_special_tokens_that_are_text_stay_text(fast: bool) -> None:
    made, text = small.gpt2_like(), f"x{small.END}y"
    plain = made.encode(text).ids
    made.encode_special_tokens = True
    as_text = made.encode(text).ids
    assert plain != as_text

    class Fast:
        """As those of transformers: it sets the flag anew for every call, to what it says itself."""

        backend_tokenizer = made
        split_special_tokens = False

    lz.register_tokenizer("as text", Fast() if fast else made)
    assert lz.tokenize(text, "as text")["input_ids"] == (plain if fast else as_text)
    Fast.split_special_tokens = True
    lz.register_tokenizer("as text", Fast())
    assert lz.tokenize([text, "x"], "as text")["input_ids"] == [as_text, [*made.encode("x").ids]]


def test_offsets_are_refused_where_they_are_not_known() -> None:
    letters = small.tiktoken.Encoding("x", pat_str=r"\p{L}+", mergeable_ranks=small.ranks(), special_tokens={})
    lz.register_tokenizer("letters", letters)
    assert lz.tokenize("ab", "letters", return_offsets=True)["offsets"] == [(0, 1), (1, 2)]
    assert lz.tokenize("a, b", "letters")["input_ids"] == letters.encode("a, b")
    for text in ("a, b", "ab,", ",ab", "é, b"):
        with pytest.raises(lz.InvalidCallError) as caught:
            lz.tokenize(["ab", text], "letters", return_offsets=True)
        assert caught.value.code == "NO_OFFSETS" and "text 1" in str(caught.value)


def test_a_registered_file_that_is_gone_is_not_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    small.gpt2_like().save(str(file))
    (tmp_path / "o").mkdir()
    small.word_level().save(str(tmp_path / "o" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    lz.register_tokenizer("o", file)
    wanted = {"input_ids": small.gpt2_like().encode("hello").ids}
    assert lz.tokenize("hello", "o") == wanted
    for _ in range(2):
        file.unlink()
        for _ in range(2):
            with pytest.raises(lz.BadTokenizerError) as caught:
                lz.tokenize("hello", "o")
            assert caught.value.code == "TOKENIZER_GONE" and str(file) in str(caught.value)
        # Written anew it is the same again.
        small.gpt2_like().save(str(file))
        assert lz.tokenize("hello", "o") == wanted
