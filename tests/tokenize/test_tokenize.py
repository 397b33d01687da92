"""`lz.tokenize` and `lz.detokenize` give what each library called directly gives, and what BPE is defined to give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from hypothesis import example, given
from hypothesis import strategies as st
from layerzero.tokenization import resolving

TEXTS = st.one_of(
    st.text(),
    st.text("abc xyz'\n\t123.é中😀"),
    st.lists(st.sampled_from([small.END, small.START, "hello", " world", "  ", "\n\n", "don't", "12345", "é"])).map(
        "".join
    ),
)
IDS = ("gpt2", "llama3", "words", "tiktoken", "sentencepiece", "with bos", "reversed")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """A tokenizer of every kind, by id."""
    before = dict(resolving._known)
    made = (
        small.gpt2_like(),
        small.llama3_like(),
        small.word_level(),
        small.encoding(),
        small.processor(),
        small.processor(add_bos=True, add_eos=True),
        small.processor(add_eos=True, reverse=True),
    )
    for name, tokenizer in zip(IDS, made, strict=True):
        lz.register_tokenizer(name, tokenizer)
    yield
    resolving._known.clear()
    resolving._known.update(before)


def directly(name: str, text: str) -> list[int]:
    """The ids the tokenizer's own library gives."""
    match name:
        case "gpt2":
            ids: list[int] = small.gpt2_like().encode(text).ids
        case "llama3":
            ids = small.llama3_like().encode(text).ids
        case "words":
            ids = small.word_level().encode(text).ids
        case "tiktoken":
            ids = small.encoding().encode_ordinary(text)
        case "sentencepiece":
            ids = small.processor().encode(text)
        case "with bos":
            ids = small.processor(add_bos=True, add_eos=True).encode(text)
        case _:
            ids = small.processor(add_eos=True, reverse=True).encode(text)
    return ids


def text_of(name: str, ids: list[int]) -> str:
    """The text the tokenizer's own library gives."""
    if name in ("gpt2", "llama3", "words"):
        made = {"gpt2": small.gpt2_like, "llama3": small.llama3_like, "words": small.word_level}[name]()
        text: str = made.decode(ids)
        return text
    if name == "tiktoken":
        text = small.encoding().decode(ids)
        return text
    text = small.processor().decode(ids) if ids else ""
    return text


@pytest.mark.parametrize("name", IDS)
@given(texts=st.lists(TEXTS, max_size=5))
@example(texts=[""])
@example(texts=[small.END, "x" * 3000, " " * 900])
def test_ids_are_those_of_the_library(name: str, texts: list[str]) -> None:
    wanted = [directly(name, text) for text in texts]
    assert lz.tokenize(texts, name) == {"input_ids": wanted}
    for text, ids in zip(texts, wanted, strict=True):
        assert lz.tokenize(text, name) == {"input_ids": ids}
        assert lz.detokenize(ids, name) == text_of(name, ids)
    if texts:
        assert lz.detokenize(wanted, name) == [text_of(name, ids) for ids in wanted]


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
@given(text=TEXTS)
def test_every_kernel_gives_the_same(name: str, text: str) -> None:
    serving = [k.kernel_id for k in lz.list_kernels("tokenize") if lz.validate(k.kernel_id, text, name)[0]]
    assert {"tiktoken.encode", "tokenizers.encode"} <= set(serving)
    for kernel in serving:
        assert lz.run_kernel(kernel, text, name) == [directly(name, text)]


@given(word=st.text(min_size=1, max_size=30))
def test_both_are_bpe_as_it_is_defined(word: str) -> None:
    """Without cutting, a text is one piece: what merges give is compared with a BPE that is slow and plain."""
    whole = small.tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = small.tokenizers.Tokenizer.from_str(small._byte_level(None, 700))
    tokenizer.pre_tokenizer = whole
    if "whole" not in resolving._known:
        lz.register_tokenizer("whole", tokenizer)
    wanted = small.slow_bpe(json.loads(tokenizer.to_str()), word)
    for kernel in ("tiktoken.encode", "tokenizers.encode"):
        assert lz.run_kernel(kernel, word, "whole") == [wanted]


@pytest.mark.parametrize("name", IDS)
@given(text=TEXTS)
def test_offsets_cover_what_tokens_stand_for(name: str, text: str) -> None:
    found = lz.tokenize(text, name, return_offsets=True)
    assert found["input_ids"] == directly(name, text)
    assert len(found["offsets"]) == len(found["input_ids"])
    assert all(0 <= begin <= end <= len(text) for begin, end in found["offsets"])
    if name in ("gpt2", "llama3", "words"):
        made = {"gpt2": small.gpt2_like, "llama3": small.llama3_like, "words": small.word_level}[name]()
        assert found["offsets"] == made.encode(text).offsets
    if name == "tiktoken":
        # A token that is whole characters is just those.
        for token, (begin, end) in zip(found["input_ids"], found["offsets"], strict=True):
            written = small.encoding().decode_single_token_bytes(token)
            assert written in text[begin:end].encode()
            assert end - begin == 1 or text[begin:end].encode() == written or not text[begin:end].isascii()
    batch = lz.tokenize([text, "x"], name, return_offsets=True)
    assert batch["offsets"][0] == found["offsets"] and len(batch["offsets"]) == 2


def test_offsets_are_only_there_when_asked_for() -> None:
    assert set(lz.tokenize("a", "gpt2")) == {"input_ids"}
    assert lz.tokenize([], "gpt2") == {"input_ids": []}
    assert lz.tokenize([], "gpt2", return_offsets=True) == {"input_ids": [], "offsets": []}
    assert lz.which("tokenize", "a", "gpt2").kernel_id == "tiktoken.encode"
    assert lz.which("tokenize", "a", "gpt2", return_offsets=True).kernel_id == "tokenizers.encode"


def test_long_texts_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.backends.tiktoken import adapter

    long = " ".join(small.corpus()) * 3
    texts = [long[i:] for i in range(0, 400, 100)]
    wanted = [directly("llama3", text) for text in texts]
    assert lz.tokenize(texts, "llama3")["input_ids"] == wanted
    monkeypatch.setattr(adapter, "_WORTH_THREADS", 1)
    assert lz.tokenize(texts, "llama3")["input_ids"] == wanted


@pytest.mark.parametrize("kind", ["numpy", "torch", "tuple", "numpy integers"])
def test_ids_in_other_forms(kind: str) -> None:
    import numpy as np
    import torch

    ids = lz.tokenize("hello world", "gpt2")["input_ids"]
    forms: dict[str, Any] = {
        "numpy": np.array(ids),
        "torch": torch.tensor(ids),
        "tuple": tuple(ids),
        "numpy integers": list(np.array(ids)),
    }
    assert lz.detokenize(forms[kind], "gpt2") == "hello world"
    assert lz.detokenize([forms[kind], []], "gpt2") == ["hello world", ""]
    assert lz.detokenize([], "gpt2") == ""


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (b"bytes", "NOT_A_TEXT"),
        (None, "NOT_A_TEXT"),
        (["a", 3], "NOT_A_TEXT"),
        (["a", None], "NOT_A_TEXT"),
        ([["a"]], "NOT_A_TEXT"),
        ("a\ud800", "LONE_SURROGATE"),
        (["a", "é\udfff"], "LONE_SURROGATE"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "tiktoken", "sentencepiece"])
def test_what_is_no_text(name: str, texts: Any, code: str) -> None:
    with pytest.raises(lz.InvalidCallError) as caught:
        lz.tokenize(texts, name)
    assert caught.value.code == code and caught.value.hint


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ([1, 100_000], "UNKNOWN_TOKEN"),
        ([-1], "UNKNOWN_TOKEN"),
        ([[1], [2**70]], "UNKNOWN_TOKEN"),
        ("text", "NOT_TOKENS"),
        (3, "NOT_TOKENS"),
        ([1.5], "NOT_TOKENS"),
        ([True], "NOT_TOKENS"),
        ([[1], 2], "NOT_TOKENS"),
        ([1, [2]], "NOT_TOKENS"),
        (["a"], "NOT_TOKENS"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "tiktoken", "sentencepiece"])
def test_what_are_no_ids(name: str, tokens: Any, code: str) -> None:
    with pytest.raises(lz.InvalidCallError) as caught:
        lz.detokenize(tokens, name)
    assert caught.value.code == code and caught.value.hint


def test_an_id_between_two_tokens_is_unknown() -> None:
    # 268 to 299 stand for nothing.
    with pytest.raises(lz.InvalidCallError, match="no token 299"):
        lz.detokenize([299], "tiktoken")
    assert lz.detokenize([300], "tiktoken") == small.END


@pytest.mark.parametrize("name", [3, None, "", object()])
def test_an_id_is_a_name(name: Any) -> None:
    for call in (lambda: lz.tokenize("a", name), lambda: lz.detokenize([1], name)):
        with pytest.raises(lz.ArgumentTypeError) as caught:
            call()
        assert caught.value.code == "BAD_TOKENIZER_ID"
    with pytest.raises(lz.ArgumentTypeError):
        lz.register_tokenizer(name, small.gpt2_like())


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/path", "a\0b", "x" * 5000, "too/many/parts", "gpt-5"])
def test_unknown_tokenizers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(lz.UnknownTokenizerError) as caught:
        lz.tokenize("a", name)
    assert caught.value.code == "UNKNOWN_TOKENIZER" and "allow_download" in caught.value.hint


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("cl100k_base", "gpt2-that-is-not-there", "org/model", "o200k_harmony"):
        with pytest.raises(lz.UnknownTokenizerError):
            lz.tokenize("a", name)


def test_objects_that_are_no_tokenizers() -> None:
    for thing in (3, object(), {"model": 1}):
        with pytest.raises(lz.ArgumentTypeError) as caught:
            lz.register_tokenizer("x", thing)
        assert caught.value.code == "NOT_A_TOKENIZER"
    with pytest.raises(lz.UnknownTokenizerError):
        lz.register_tokenizer("x", "/no/such/file.json")
    with pytest.raises(lz.BadTokenizerError, match="samples"):
        lz.register_tokenizer("x", small.processor(enable_sampling=True, nbest_size=-1, alpha=0.1))
    with pytest.raises(lz.BadTokenizerError, match="dropout"):
        lz.register_tokenizer("x", small.changed(small.gpt2_like(), model_dropout=0.1))


# --- where tokenizers come from ---------------------------------------------------------------------------------------


def test_files_and_directories(tmp_path: Path) -> None:
    import base64

    small.gpt2_like().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "spm").mkdir()
    (tmp_path / "spm" / "tokenizer.model").write_bytes(small.sentencepiece_model())
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in small.ranks().items()]
    (tmp_path / "r50k_base.tiktoken").write_text("".join(lines))
    (tmp_path / "other.tiktoken").write_text("".join(lines))
    text = "hello world, don't é"
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert lz.tokenize(text, str(name))["input_ids"] == directly("gpt2", text)
    for name in (tmp_path / "spm", tmp_path / "spm" / "tokenizer.model"):
        assert lz.tokenize(text, str(name))["input_ids"] == directly("sentencepiece", text)
    assert lz.tokenize(text, str(tmp_path / "r50k_base.tiktoken"))["input_ids"] == directly("tiktoken", text)
    with pytest.raises(lz.BadTokenizerError, match="pattern"):
        lz.tokenize(text, str(tmp_path / "other.tiktoken"))
    lz.register_tokenizer("by path", tmp_path)
    assert lz.tokenize(text, "by path")["input_ids"] == directly("gpt2", text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(lz.UnknownTokenizerError):
        lz.tokenize(text, str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "r50k_base.tiktoken"])
@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe\x00", b"not a tokenizer", b"[1, 2]"])
def test_damaged_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(lz.BadTokenizerError) as caught:
        lz.tokenize("a", str(tmp_path / name))
    assert caught.value.code == "BAD_TOKENIZER" and str(tmp_path) in str(caught.value)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    small.gpt2_like().save(str(path))
    assert lz.tokenize("hello", str(path))["input_ids"] == directly("gpt2", "hello")
    small.word_level().save(str(path))
    assert lz.tokenize("hello", str(path))["input_ids"] == [1]
    assert lz.which("tokenize", "hello", str(path)).kernel_id == "tokenizers.encode"
    path.unlink()
    with pytest.raises(lz.UnknownTokenizerError):
        lz.tokenize("hello", str(path))


def test_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "a" * 40
    model = tmp_path / "models--org--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    small.llama3_like().save(str(model / "snapshots" / commit / "tokenizer.json"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert lz.tokenize("hello", "org/model")["input_ids"] == directly("llama3", "hello")


def test_encodings_of_tiktoken_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64
    import hashlib

    from tiktoken import load, registry

    url = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in small.ranks().items()]
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_text("".join(lines))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(load, "check_hash", lambda *_: True)
    monkeypatch.setattr(registry, "ENCODINGS", {})
    small_encoding = small.tiktoken.Encoding
    monkeypatch.setattr(
        registry,
        "Encoding",
        lambda explicit_n_vocab, **rest: small_encoding(**{**rest, "special_tokens": {small.END: 300}}),
    )
    assert lz.tokenize("hello world", "r50k_base")["input_ids"] == directly("tiktoken", "hello world")


def test_what_is_done_to_an_object_later_changes_nothing() -> None:
    tokenizer = small.gpt2_like()
    lz.register_tokenizer("copied", tokenizer)
    tokenizer.add_tokens(["hello"])
    tokenizer.enable_padding(length=50)
    assert lz.tokenize("hello", "copied")["input_ids"] == directly("gpt2", "hello")
    lz.register_tokenizer("copied", tokenizer)
    assert lz.tokenize("hello", "copied")["input_ids"] == [tokenizer.token_to_id("hello")]


def test_fast_tokenizers_of_transformers() -> None:
    class Fast:
        """As `PreTrainedTokenizerFast` is: it holds one, and sets its truncation and padding as it likes."""

        backend_tokenizer = small.gpt2_like()

    Fast.backend_tokenizer.enable_truncation(3)
    Fast.backend_tokenizer.enable_padding(length=9)
    lz.register_tokenizer("fast", Fast())
    text = "hello world, how are you?"
    assert lz.tokenize(text, "fast")["input_ids"] == directly("gpt2", text)
    truncating = small.gpt2_like()
    truncating.enable_truncation(3)
    lz.register_tokenizer("truncating", truncating)
    assert lz.tokenize(text, "truncating")["input_ids"] == directly("gpt2", text)[:3]


def test_importing_layerzero_imports_none_of_them() -> None:
    code = (
        "import sys, layerzero as lz; lz.list_kernels(); "
        "print({'tokenizers', 'tiktoken', 'sentencepiece', 'huggingface_hub'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "set()"


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(lz.BadTokenizerError) as caught:
        lz.tokenize("a", str(tmp_path))
    assert caught.value.code == "LIBRARY_MISSING" and caught.value.hint == "pip install tokenizers"
