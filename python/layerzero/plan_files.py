"""Compiled models as files: ``lz.compile(…).save(path)`` and ``lz.load_plan(path)``.

A file has a head and the weights. The weights are mapped into memory, so that several processes share them.

    bytes 0–7     LZPLAN03
    bytes 8–15    length of the head, little-endian
    bytes 16–47   SHA-256 of the head
    head          JSON: the fields that `saved_graphs.py` writes, and for each weight its name, dtype, shape, offset, length and
                  SHA-256
    weights       each at a multiple of 64 bytes from the start of the file

A file holds no code: no pickle, and no names that Python would look up.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import ConfigurationError

_MAGIC = b"LZPLAN03"
_HEAD_AT = 48
_ALIGN = 64
#: The longest head that is read. A model has at most some ten thousand nodes, of a few hundred bytes each.
_LONGEST_HEAD = 256 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class PlanFile:
    """The contents of a file."""

    head: dict[str, Any]
    """The fields."""
    weights: list[Tensor]
    """The weights, mapped from the file."""


def bad(path: str | Path, why: str) -> ConfigurationError:
    """The error for a file that is no plan file, or is damaged."""
    hint = "write it again with lz.compile(…).save(…)"
    return ConfigurationError(f"{path} is no plan of a compiled model: {why}", code="BAD_PLAN", hint=hint)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def write(path: str | Path, head: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Writes a file atomically: a reader sees the old file or the new one, never a part."""
    target = Path(path)
    rows: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in weights.items():
        data = _bytes(tensor)
        rows.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
                "length": data.nbytes,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
        offset += -(-data.nbytes // _ALIGN) * _ALIGN
    text = json.dumps({**head, "weights": rows, "weights_length": offset}, separators=(",", ":")).encode()
    # The weights begin at the next multiple of 64 after the head.
    first = -(-(_HEAD_AT + len(text)) // _ALIGN) * _ALIGN
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)
            for row, tensor in zip(rows, weights.values(), strict=True):
                file.seek(first + row["offset"])
                file.write(_bytes(tensor))
            file.truncate(first + offset)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets only the owner read. Give the file the permissions that the umask allows.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    """The process's umask. The only way to read it is to set it for a moment."""
    before = os.umask(0o077)
    os.umask(before)
    return before


def read(path: str | Path, *, verify: bool = True) -> PlanFile:
    """Reads a file. With ``verify``, all weights are read once and compared with their checksums."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_HEAD_AT)
            if len(start) < _HEAD_AT or start[:6] != _MAGIC[:6]:
                raise bad(path, "it does not begin as one")
            if start[:8] != _MAGIC:
                version = start[6:8].decode("ascii", "replace")
                raise bad(path, f"its format is version {version}, this LayerZero reads version 03")
            length = int.from_bytes(start[8:16], "little")
            if length > min(size - _HEAD_AT, _LONGEST_HEAD):
                raise bad(
                    path, f"its head should be {length} bytes long, and the file has {size} bytes: it was cut off"
                )
            text = file.read(length)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror or error}", code="UNREADABLE_FILE", hint="check the path"
        ) from error
    if hashlib.sha256(text).digest() != start[16:48]:
        raise bad(path, "its head does not match its checksum")
    head = json.loads(text)
    first = -(-(_HEAD_AT + length) // _ALIGN) * _ALIGN
    if size != first + head["weights_length"]:
        raise bad(path, f"it should have {first + head['weights_length']} bytes, and has {size}: it was cut off")
    weights = [_weight(path, mapped, first, row, size, verify=verify) for row in head["weights"]]
    return PlanFile(head, weights)


def _weight(path: str | Path, mapped: mmap.mmap, first: int, row: dict[str, Any], size: int, *, verify: bool) -> Tensor:
    name, dtype = row["name"], _DTYPES.get(row["dtype"])
    if dtype is None:
        raise bad(path, f"the weight '{name}' is {row['dtype']}, which is unknown here")
    start, length, count = first + row["offset"], row["length"], 1
    for extent in row["shape"]:
        count *= extent
    if min(row["shape"], default=0) < 0 or row["offset"] < 0 or count * dtype.itemsize != length:
        raise bad(path, f"the weight '{name}' of shape {row['shape']} cannot have {length} bytes")
    if start % _ALIGN:
        raise bad(path, f"the weight '{name}' begins at byte {start}, which is no multiple of {_ALIGN}")
    if start + length > size:
        raise bad(path, f"the weight '{name}' ends at byte {start + length} of {size}: the file was cut off")
    if verify and hashlib.sha256(memoryview(mapped)[start : start + length]).hexdigest() != row["sha256"]:
        raise bad(path, f"the weight '{name}' does not match its checksum")
    if count == 0:
        return torch.empty(row["shape"], dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).reshape(row["shape"])
