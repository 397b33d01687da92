"""Small tokenizers of every library, made here, and an independent slow BPE."""

from __future__ import annotations

import io
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
tiktoken = pytest.importorskip("tiktoken", reason="the library tiktoken is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="the library sentencepiece is not installed")

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parents[2]
END, START = "<|endoftext|>", "<|begin|>"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def corpus() -> list[str]:
    """Some English, and some of other scripts."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")]
    other = "Ein Satz über Größe. Ça va très bien, merci à tous. 中文字符 日本語 😀😃 1234 567 don't I'll we've"
    return [*(line for page in pages for line in page.splitlines()), *[other] * 20]


@cache
def _byte_level(pattern: str | None, size: int) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, last]) if cut else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    text: str = tokenizer.to_str()
    return text


def gpt2_like(size: int = 700) -> Any:
    """Byte-level BPE as GPT-2's: one special token, nothing put around texts."""
    tokenizer = tokenizers.Tokenizer.from_str(_byte_level(None, size))
    tokenizer.add_special_tokens([END])
    return tokenizer


def llama3_like(size: int = 700) -> Any:
    """Byte-level BPE as Llama 3's: a pattern of its own, and a token before every text."""
    tokenizer = tokenizers.Tokenizer.from_str(_byte_level(LLAMA_3, size))
    tokenizer.add_special_tokens([START, END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return tokenizer


def word_level() -> Any:
    """A tokenizer of words, with a normalizer: nothing tiktoken could do."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "hello", "world", "a", "b"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def changed(tokenizer: Any, **parts: Any) -> Any:
    """The same tokenizer with some parts of its JSON replaced; `model_` before a name replaces one of its model."""
    data = json.loads(tokenizer.to_str())
    for name, value in parts.items():
        if name.startswith("model_"):
            data["model"][name.removeprefix("model_")] = value
        else:
            data[name] = value
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@cache
def ranks() -> dict[bytes, int]:
    """A vocabulary for tiktoken: bytes, and some joined."""
    words = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b" worl", b" world", b"in", b"ing", "é".encode()]
    return {bytes([i]): i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}


def encoding() -> Any:
    """An encoding of tiktoken's."""
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={END: 300})


@cache
def sentencepiece_model(kind: str = "unigram") -> bytes:
    """A trained model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=420,
        model_type=kind,
        byte_fallback=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def processor(**options: Any) -> Any:
    """A processor of SentencePiece's."""
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(), **options)


def slow_bpe(data: dict[str, Any], word: str) -> list[int]:
    """BPE as it is defined: as long as there is a merge for two neighbours, the earliest is made, leftmost first.

    `word` is a piece of a text, not split any further.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    order = {tuple(pair): i for i, pair in enumerate(data["model"]["merges"])}
    return merged(order, [chars[byte] for byte in word.encode()], data["model"]["vocab"])


def merged(order: dict[tuple[str, ...], int], parts: list[str], vocab: dict[str, int]) -> list[int]:
    """The ids after every merge that can be made."""
    while len(parts) > 1:
        found = [(order.get((a, b), len(order)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(found)
        if rank == len(order):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [vocab[part] for part in parts]
