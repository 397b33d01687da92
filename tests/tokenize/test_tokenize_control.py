"""Who serves texts: policy, failures, threads; and what is remembered of texts seen before."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from hypothesis import given
from hypothesis import strategies as st
from layerzero.tokenization import remembering, resolving
from layerzero.tokenization.remembering import REMEMBERED, is_checked

TEXT = "hello world, don't é 123"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """One tokenizer two libraries can serve, and nothing remembered."""
    if "two" not in resolving._known:
        lz.register_tokenizer("two", small.gpt2_like())
    REMEMBERED.clear()
    yield
    lz.reset()
    REMEMBERED.clear()


def ids(text: str = TEXT) -> list[int]:
    """What the library gives."""
    found: list[int] = small.gpt2_like().encode(text).ids
    return found


def chosen(*args: Any) -> str:
    """The kernel that serves."""
    return str(lz.which("tokenize", *(args or (TEXT,)), "two").kernel_id)


# --- policy -----------------------------------------------------------------------------------------------------------


def test_the_operator_decides() -> None:
    assert chosen() == "tiktoken.encode"
    with lz.prefer("tokenizers"):
        assert chosen() == "tokenizers.encode" and lz.tokenize(TEXT, "two")["input_ids"] == ids()
    with lz.avoid("tiktoken"):
        assert chosen() == "tokenizers.encode"
    with lz.disabled():
        assert chosen() == "tokenizers.encode" and lz.tokenize(TEXT, "two")["input_ids"] == ids()
        assert lz.detokenize(ids(), "two") == TEXT
    assert chosen() == "tiktoken.encode"
    lz.force_kernel("tokenize.encode", "tokenizers.encode")
    try:
        assert chosen() == "tokenizers.encode"
        assert lz.explain("tokenize", TEXT, "two").basis == "locked"
    finally:
        lz.unforce_kernel("tokenize.encode")
    lz.force_kernel("tokenize.encode", "sentencepiece.encode")
    try:
        with pytest.raises(lz.NoKernelFoundError, match="sentencepiece"):
            lz.tokenize(TEXT, "two")
        with lz.disabled():
            assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
    finally:
        lz.unforce_kernel("tokenize.encode")
    assert chosen() == "tiktoken.encode"


def test_rules_go_by_sizes_and_by_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    file.write_text(
        "version: 1\n"
        "rules:\n"
        "  - match: {operation: tokenize.encode, length: '>1000'}\n"
        "    deny: tiktoken.*\n"
        "  - match: {operation: tokenize.encode, texts: '>=3'}\n"
        "    deny: tiktoken.*\n"
    )
    from layerzero import _native

    lz.load_config(file)
    try:
        assert chosen("a" * 1000) == "tiktoken.encode" and chosen("a" * 1001) == "tokenizers.encode"
        assert chosen(["a", "b"]) == "tiktoken.encode" and chosen(["a", "b", "c"]) == "tokenizers.encode"
        assert lz.tokenize("a" * 1001, "two")["input_ids"] == ids("a" * 1001)
    finally:
        _native.load_sources()


def test_selections_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lz.register_tokenizer("logged", small.gpt2_like())
    lz.configure(log_selections=True)
    with caplog.at_level(logging.INFO, logger="layerzero"):
        for _ in range(3):
            lz.tokenize(TEXT, "logged")
    said = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "selected"]
    assert len(said) == 1 and "tiktoken.encode" in said[0]


# --- failures ---------------------------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, library: str, error: Exception) -> list[str]:
    """Has the object of a library fail; gives what it was called with."""
    called: list[str] = []

    class Broken:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            raise error

    monkeypatch.setitem(resolving._known["two"].tokenizer.libraries, library, Broken())
    return called


def test_the_next_library_serves_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    called = broken(monkeypatch, "tiktoken", RuntimeError("broken on purpose"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
    kernel = lz.health().kernels["tiktoken.encode"]
    assert "broken on purpose" in kernel["last_error"]["message"]
    # Its circuit opened: it was not asked every time.
    assert 0 < len(called) < 10
    assert chosen() == "tokenizers.encode"
    lz.forget_failures()
    monkeypatch.undo()
    assert chosen() == "tiktoken.encode" and lz.tokenize(TEXT, "two")["input_ids"] == ids()


def test_the_tokenizers_own_library_is_asked_even_so(monkeypatch: pytest.MonkeyPatch) -> None:
    called = broken(monkeypatch, "tokenizers", RuntimeError("broken on purpose"))
    with lz.prefer("tokenizers"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(10):
                assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
        assert len(called) == 10
    broken(monkeypatch, "tiktoken", RuntimeError("broken as well"))
    with pytest.raises(lz.KernelExecutionError) as caught:
        lz.tokenize(TEXT, "two")
    assert set(caught.value.failures) == {"tokenizers.encode", "tiktoken.encode"}


def test_a_kernel_that_gives_something_else_has_failed() -> None:
    @lz.register_kernel(
        operation="tokenize.encode", kernel_id="mine.encode", platform="cpu", supported_dtypes=[], priority=100
    )
    def mine(texts: list[str], tokenizer_id: str) -> Any:
        return {"input_ids": [tokenizer_id for _ in texts]}

    try:
        with pytest.warns(lz.LayerZeroWarning, match="mine.encode"):
            assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
    finally:
        lz.unregister_kernel("mine.encode")
    with pytest.raises(lz.ConfigurationError, match="nonsense"):

        @lz.register_kernel(
            operation="tokenize.encode", kernel_id="mine.encode", platform="cpu", supported_dtypes=[], priority=100
        )
        def bad(texts: list[str], nonsense: int) -> Any:
            return texts


def encoder(seen: list[int], wrong: bool) -> Any:
    """A kernel of one's own, that is right but perhaps for texts with a line in them."""
    lz.configure(verify="first_use")

    @lz.register_kernel(
        operation="tokenize.encode", kernel_id="mine.encode", platform="cpu", supported_dtypes=[], priority=100
    )
    def mine(texts: list[str], tokenizer_id: str) -> list[list[int]]:
        seen.append(len(texts))
        return [ids(text)[:-1] if wrong and "\n" in text else ids(text) for text in texts]

    return mine


def test_a_kernel_of_ones_own_is_compared_before_it_serves() -> None:
    seen: list[int] = []
    encoder(seen, wrong=True)
    try:
        assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
        assert len(seen) == 1 and seen[0] > 10, "it was compared on hard texts, and served none"
        assert lz.tokenize("a\nb", "two")["input_ids"] == ids("a\nb") and len(seen) == 1
        (wrong,) = lz.health().wrong_results
        assert wrong["kernel"] == "mine.encode" and "tokenizers.encode" in wrong["error"]
        assert chosen() != "mine.encode"
    finally:
        lz.unregister_kernel("mine.encode")
        lz.forget_failures()


def test_a_kernel_of_ones_own_that_is_right_serves() -> None:
    seen: list[int] = []
    encoder(seen, wrong=False)
    try:
        for text in (TEXT, "a\nb", TEXT):
            assert lz.tokenize(text, "two")["input_ids"] == ids(text)
        assert chosen() == "mine.encode"
        assert seen[1:] == [1, 1, 1], "compared once, then every call is its own"
        assert not lz.health().wrong_results
    finally:
        lz.unregister_kernel("mine.encode")


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_nothing_is_remembered_unless_asked_for() -> None:
    lz.tokenize(TEXT, "two")
    assert REMEMBERED.bytes == 0


@given(texts=st.lists(st.lists(st.text(max_size=8), max_size=6), max_size=6))
def test_what_is_remembered_is_right(texts: list[list[str]]) -> None:
    lz.configure(tokenizer={"cache_mb": 1})
    for batch in texts * 2:
        found = lz.tokenize(batch, "two")["input_ids"]
        assert found == [ids(text) for text in batch]
        # They are the caller's own.
        for own in found:
            own.append(-1)


def test_a_hit_does_not_call_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    lz.configure(tokenizer={"cache_mb": 1})
    lz.tokenize(TEXT, "two")
    for library in ("tiktoken", "tokenizers"):
        broken(monkeypatch, library, AssertionError("asked"))
    for _ in range(9):
        assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
    with pytest.raises(lz.KernelExecutionError):
        lz.tokenize(TEXT, "two")


def test_how_many_are_checked() -> None:
    checked = [hit for hit in range(1, 10_101) if is_checked(hit)]
    assert len([h for h in checked if h <= 100]) == 10
    assert len([h for h in checked if 100 < h <= 1100]) == 10
    assert len([h for h in checked if h > 1100]) == 9


def test_a_mismatch_ends_it_for_that_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    lz.configure(tokenizer={"cache_mb": 1})
    lz.register_tokenizer("other", small.gpt2_like())
    namespace = resolving._known["two"].tokenizer.namespace
    REMEMBERED.keep(namespace, TEXT, [1, 2, 3], 1 << 20)
    lz.tokenize("kept", "other")
    for _ in range(9):
        assert lz.tokenize(TEXT, "two")["input_ids"] == [1, 2, 3]
    with caplog.at_level(logging.ERROR, logger="layerzero"), pytest.warns(lz.LayerZeroWarning, match="no longer"):
        assert lz.tokenize(TEXT, "two")["input_ids"] == ids()
    event = next(r for r in caplog.records if getattr(r, "event", "") == "tokenizer_cache_mismatch")
    assert event.layerzero["tokenizer_id"] == "two"  # type: ignore[attr-defined]
    assert TEXT not in event.getMessage()
    assert REMEMBERED.is_off(namespace) and lz.tokenize(TEXT, "two")["input_ids"] == ids()
    assert REMEMBERED.find(namespace, [TEXT])[0] == [None]
    assert not REMEMBERED.is_off(resolving._known["other"].tokenizer.namespace)
    assert REMEMBERED.find(resolving._known["other"].tokenizer.namespace, ["kept"])[0] != [None]


def test_another_tokenizer_of_the_same_id_is_another(tmp_path: Path) -> None:
    lz.configure(tokenizer={"cache_mb": 1})
    path = tmp_path / "tokenizer.json"
    small.gpt2_like().save(str(path))
    assert lz.tokenize("hello", str(path))["input_ids"] == ids("hello")
    small.word_level().save(str(path))
    assert lz.tokenize("hello", str(path))["input_ids"] == [1]


@given(sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), max_size=40))
def test_it_stays_within_its_bounds(sizes: list[tuple[int, int]]) -> None:
    kept, limit = remembering.Remembered(), 4000
    for number, length in sizes:
        kept.keep("n", f"{number}" + "x" * length, [number] * length, limit)
        assert 0 <= kept.bytes <= limit
    kept.turn_off("n")
    assert kept.bytes == 0


def test_what_was_used_last_is_kept() -> None:
    kept = remembering.Remembered()
    one = remembering._size("a", remembering.array("I", [1]))
    for text in "abc":
        kept.keep("n", text, [1], 3 * one)
    kept.find("n", ["a"])
    kept.keep("n", "d", [1], 3 * one)
    assert kept.find("n", ["a", "b", "c", "d"])[0] == [[1], None, [1], [1]]


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_many_threads(cache_mb: int) -> None:
    lz.configure(tokenizer={"cache_mb": cache_mb})
    texts = [f"{line} {i}" for i, line in enumerate(small.corpus()[:40])]
    wanted = [ids(text) for text in texts]
    ready, wrong = threading.Barrier(4), []

    def work(offset: int) -> None:
        ready.wait()
        for at in range(len(texts)):
            i = (at + offset) % len(texts)
            if lz.tokenize(texts[i], "two")["input_ids"] != wanted[i]:
                wrong.append(i)
            if lz.tokenize(texts[i : i + 3], "two")["input_ids"] != wanted[i : i + 3]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_ask_first_load_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.gpt2_like().save(str(tmp_path / "tokenizer.json"))
    loads: list[str] = []
    load = resolving._load

    def counted(library: str, *rest: Any) -> Any:
        loads.append(library)
        return load(library, *rest)

    monkeypatch.setattr(resolving, "_load", counted)
    ready = threading.Barrier(4)
    found: list[list[int]] = []

    def work() -> None:
        ready.wait()
        found.append(lz.tokenize(TEXT, str(tmp_path))["input_ids"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ids()] * 4 and loads == ["tokenizers"]
