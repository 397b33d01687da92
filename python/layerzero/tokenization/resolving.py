"""From an id to a tokenizer: registered ones, files, tiktoken's names, the Hugging Face cache. Nothing is fetched unless
`tokenizer.allow_download` says that it may."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from layerzero import _native, loading
from layerzero.errors import ArgumentTypeError, BadTokenizerError, UnknownTokenizerError, named_line
from layerzero.lifecycle import open_in_forks
from layerzero.tokenization.tokenizer import LIBRARIES, Loaded, Tokenizer

_ALLOW = 'lz.configure(tokenizer={"allow_download": True}) allows it'
_BUILT_FOR = "it was not shown to give the ids of {own}"


@dataclass(slots=True)
class _Entry:
    tokenizer: Tokenizer
    path: Path | None
    stamp: tuple[int, ...]
    registered: bool = False
    """Its id was given to it, and means nothing else."""


_lock = open_in_forks(threading.RLock())
_known: dict[str, _Entry] = {}


def resolve(tokenizer_id: str) -> Tokenizer:
    """The tokenizer of an id. A file that changed since is read again."""
    entry = _known.get(tokenizer_id)
    if entry is None or entry.path is not None and _stamp(entry.path) != entry.stamp:
        entry = _resolve(tokenizer_id)
    return entry.tokenizer


def register_tokenizer(tokenizer_id: str, tokenizer: Any) -> None:
    """Gives a tokenizer an id, in place of what the id stood for before.

    Args:
        tokenizer_id: what `tokenize` and `detokenize` shall know it by.
        tokenizer: a path (see `tokenize`), a `tokenizers.Tokenizer`, a fast tokenizer of transformers, a
            `tiktoken.Encoding` or a `sentencepiece.SentencePieceProcessor`. Objects are copied: what is done to one
            later changes nothing, register it again.
    """
    check_id(tokenizer_id)
    with _lock:
        if isinstance(tokenizer, str | os.PathLike):
            path = Path(tokenizer)
            if (file := _file(path)) is None:
                raise _unknown(tokenizer_id, [f"there is no tokenizer at '{path}'"])
            _known[tokenizer_id] = replace(_from_file(tokenizer_id, file), registered=True)
            return
        for library in LIBRARIES:
            if _adapter(library).is_mine(tokenizer):
                loaded = _load(library, tokenizer_id, type(tokenizer).__name__, tokenizer)
                _known[tokenizer_id] = _Entry(_complete(tokenizer_id, library, loaded), None, (), True)
                return
    raise ArgumentTypeError(
        f"register_tokenizer: '{tokenizer_id}' is a {type(tokenizer).__name__}, expected a tokenizer or a path",
        code="NOT_A_TOKENIZER",
        hint="pass a tokenizers.Tokenizer, a fast tokenizer of transformers, a tiktoken.Encoding, a "
        "SentencePieceProcessor, or the path of a file; slow tokenizers of transformers have no library of their own",
    )


def known() -> dict[str, _Entry]:
    """Every tokenizer that has an id now."""
    with _lock:
        return dict(_known)


def restore(entries: dict[str, _Entry]) -> None:
    """Puts the ids back that there were when :func:`known` was asked."""
    with _lock:
        _known.clear()
        _known.update(entries)


def check_id(tokenizer_id: object) -> None:
    """An id is a name or a path."""
    if not isinstance(tokenizer_id, str) or not tokenizer_id:
        raise ArgumentTypeError(
            f"'tokenizer_id' is {tokenizer_id!r:.80}, expected a name or a path",
            code="BAD_TOKENIZER_ID",
            hint="register a tokenizer object with lz.register_tokenizer and pass its id",
        )


def _resolve(tokenizer_id: str) -> _Entry:
    check_id(tokenizer_id)
    loading.load()
    with _lock:
        entry = _known.get(tokenizer_id)
        if entry is not None and entry.path is not None:
            stamp = _stamp(entry.path)
            # Another thread may have read it just now.
            if not stamp and entry.registered:
                raise BadTokenizerError(
                    f"the tokenizer '{tokenizer_id}' was registered with '{entry.path}', which no longer exists",
                    code="TOKENIZER_GONE",
                    hint="put the file back, or register another with lz.register_tokenizer",
                )
            if stamp != entry.stamp:
                registered = entry.registered
                entry = replace(_from_file(tokenizer_id, entry.path), registered=registered) if stamp else None
        if entry is None:
            entry = _find(tokenizer_id)
        _known[tokenizer_id] = entry
        return entry


def _find(tokenizer_id: str) -> _Entry:
    looked = []
    if "\0" not in tokenizer_id and (file := _file(Path(tokenizer_id))) is not None:
        return _from_file(tokenizer_id, file)
    looked.append("no file or directory of a tokenizer has that path")
    for find in (_tiktoken_encoding, _in_hub_cache):
        found = find(tokenizer_id)
        if not isinstance(found, str):
            return found
        looked.append(found)
    raise _unknown(tokenizer_id, looked)


def _unknown(tokenizer_id: str, looked: list[str]) -> UnknownTokenizerError:
    return UnknownTokenizerError(
        f"there is no tokenizer '{tokenizer_id}' here: {'; '.join(looked)}",
        code="UNKNOWN_TOKENIZER",
        hint=f"pass the path of a tokenizer.json, register one with lz.register_tokenizer; nothing is fetched, {_ALLOW}",
    )


def _file(path: Path) -> Path | None:
    """The file a path means: itself, or the one of a model's directory."""
    try:
        if path.is_file():
            return path
        if not path.is_dir():
            return None
    except OSError:
        return None
    for pattern in ("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken"):
        if found := sorted(path.glob(pattern)):
            return found[0]
    return None


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file does; nothing when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _from_file(tokenizer_id: str, path: Path) -> _Entry:
    library = {".model": "sentencepiece", ".tiktoken": "tiktoken"}.get(path.suffix, "tokenizers")
    # Read before the file: what is written meanwhile is seen the next time.
    path = path.absolute()
    stamp = _stamp(path)
    loaded = _load(library, tokenizer_id, str(path), path)
    return _Entry(_complete(tokenizer_id, library, loaded), path, stamp)


def _tiktoken_encoding(name: str) -> _Entry | str:
    """One of tiktoken's own encodings, if its ranks are on this machine."""
    try:
        import tiktoken
        from tiktoken import registry
    except ImportError:
        return "tiktoken is not installed"
    if name not in tiktoken.list_encoding_names():
        return "tiktoken has no encoding of that name"
    if not _native.tokenizer_settings()[0]:
        # The files an encoding is made from are named in its constructor.
        constructor = (registry.ENCODING_CONSTRUCTORS or {})[name]
        code = getattr(constructor, "__code__", None)
        names = [c for c in (code.co_consts if code else ()) if isinstance(c, str) and c.startswith("https://")]
        if name == "o200k_harmony":
            names = ["https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"]
        folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
        cache = Path(folder) if folder is not None else Path(tempfile.gettempdir(), "data-gym-cache")
        here = [(cache / hashlib.sha1(n.encode()).hexdigest()).is_file() for n in names]
        if folder == "" or not here or not all(here):
            return f"tiktoken has the encoding, but its files are not in {cache}"
    loaded = _load("tiktoken", name, f"the encoding '{name}'", tiktoken.get_encoding(name))
    return _Entry(_complete(name, "tiktoken", loaded), None, ())


def _in_hub_cache(name: str) -> _Entry | str:
    """A model of the local Hugging Face cache."""
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id
    except ImportError:
        return "huggingface_hub is not installed"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "it is no name of a model on the Hugging Face hub"
    names = ("tokenizer.json", "tokenizer.model")
    for file in names:
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return _from_file(name, Path(found))
    if not _native.tokenizer_settings()[0]:
        return f"the Hugging Face cache ({constants.HF_HUB_CACHE}) has none of that name"
    said = ""
    for file in names:
        try:
            return _from_file(name, Path(hf_hub_download(name, file)))
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"the Hugging Face hub gave none ({said})"


def _adapter(library: str) -> Any:
    return import_module(f"layerzero.backends.{library}.adapter")


def _load(library: str, tokenizer_id: str, what: str, source: Any) -> Loaded:
    adapter = _adapter(library)
    try:
        adapter.detect()
        loaded: Loaded = adapter.from_file(source) if isinstance(source, Path) else adapter.from_object(source)
    except ImportError as error:
        raise BadTokenizerError(
            f"the tokenizer '{tokenizer_id}' ({what}) needs {library}: {error}",
            code="LIBRARY_MISSING",
            hint=f"pip install {library}",
        ) from error
    # The libraries raise plain exceptions, of many classes, for what they cannot read.
    except Exception as error:
        raise BadTokenizerError(
            f"the tokenizer '{tokenizer_id}' ({what}) cannot be read by {library}: {named_line(error)}",
            code="BAD_TOKENIZER",
            hint="see whether the file is whole and of a kind the library reads, or save it again",
        ) from error
    return loaded


def _complete(tokenizer_id: str, own: str, loaded: Loaded) -> Tokenizer:
    """The tokenizer with every library that was shown to give its ids, and why the others do not serve it."""
    libraries = {own: loaded.object}
    refused = {name: _BUILT_FOR.format(own=own) for name in LIBRARIES if name != own}
    if own == "tokenizers" and loaded.document is not None:
        found = _by_tiktoken(loaded)
        if isinstance(found, str):
            refused["tiktoken"] = found
        else:
            libraries["tiktoken"] = found
            del refused["tiktoken"]
    return Tokenizer(tokenizer_id, own, loaded.identity, loaded.ids, libraries, refused)


def _by_tiktoken(loaded: Loaded) -> Any:
    """tiktoken's own way to the ids of a tokenizer of Hugging Face's, or why it has none."""
    try:
        _adapter("tiktoken").detect()
    except ImportError:
        return "tiktoken is not installed"
    from layerzero.backends.tiktoken import proof

    try:
        return proof.build(loaded.document or {}, loaded.object)
    except proof.Differs as why:
        return str(why)
