"""The calls of the GPU table: what models call, by family; and calls at sizes between, which are not tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

EAGER, GRAPH = "eager", "graph"
MODES = (EAGER, GRAPH)

#: Heads, key/value heads, head size.
LLAMA_8B = (32, 8, 128)
LLAMA_70B = (64, 8, 128)
QWEN_7B = (28, 4, 128)
GPT2 = (12, 12, 64)
WIDE = (8, 8, 256)
GEMMA = (16, 8, 256)
GEMMA_27B = (32, 16, 128)
GPT_OSS = (64, 8, 64)
PHI3_MINI = (32, 32, 96)

BF16, FP16, F32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True)
class Row:
    """A call, the family it is counted in, and the ways it is made."""

    family: str
    call: dict[str, Any]
    shape: str
    modes: tuple[str, ...] = MODES

    @property
    def dtype(self) -> str:
        """The dtype of what it computes on."""
        tensors = self.call["tensors"]
        first = next(name for name in ("query", "q_nope", "input", "gate", "logits") if name in tensors)
        return str(tensors[first]["dtype"])


def _call(op: str, tensors: Mapping[str, tuple[str, Sequence[int]]], layout: str | None = None, **params: Any) -> Any:
    written: dict[str, Any] = {
        "op": op,
        "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items()},
    }
    if params:
        written["params"] = params
    if layout:
        written["layout"] = layout
    return written


def _attention(
    family: str,
    batch: int,
    seq_q: int,
    heads: tuple[int, int, int],
    seq_k: int | None = None,
    dtype: str = BF16,
    op: str = "attention.causal",
    note: str = "",
    **params: Any,
) -> Row:
    q, kv, size = heads
    seq_k = seq_q if seq_k is None else seq_k
    key = (dtype, (batch, kv, seq_k, size))
    tensors = {"query": (dtype, (batch, q, seq_q, size)), "key": key, "value": key}
    lengths = f"{seq_q}" if seq_q == seq_k else f"{seq_q}:{seq_k}"
    shape = f"{batch}×{lengths} {q}/{kv}×{size}{note}"
    return Row(family, _call(op, tensors, "BHSD", **params), shape)


def _paged(batch: int, context: int, heads: tuple[int, int, int] = LLAMA_8B, page: int = 16) -> Row:
    q, kv, size = heads
    pages = -(-context // page)
    cache = (BF16, (batch * pages, page, kv, size))
    tensors = {
        "query": (BF16, (batch, q, size)),
        "key_cache": cache,
        "value_cache": cache,
        "block_tables": ("int32", (batch, pages)),
        "context_lens": ("int32", (batch,)),
    }
    return Row(
        "paged", _call("attention.gqa.decode.paged", tensors, "NHD"), f"{batch}×{context} {q}/{kv}×{size} p{page}"
    )


def _cascade(batch: int, context: int) -> Row:
    """Decoding behind a prompt that all sequences have in the same pages: three quarters of the context."""
    row, shared = _paged(batch, context), context * 3 // 4
    call = {**row.call, "params": {"shared_prefix": shared}}
    return Row("cascade", call, f"{row.shape} shared {shared}")


def _mla(batch: int, context: int, page: int = 64) -> Row:
    pages = -(-context // page)
    tensors = {
        "q_nope": (BF16, (batch, 128, 512)),
        "q_pe": (BF16, (batch, 128, 64)),
        "ckv_cache": (BF16, (batch * pages, page, 512)),
        "kpe_cache": (BF16, (batch * pages, page, 64)),
        "block_tables": ("int32", (batch, pages)),
        "context_lens": ("int32", (batch,)),
    }
    # DeepSeek's heads are of 128 + 64 before the projections are absorbed.
    call = _call("attention.mla.decode.paged", tensors, scale=192**-0.5)
    return Row("mla", call, f"{batch}×{context} 128×(512+64) p{page}")


def _rms(rows: int, hidden: int, dtype: str = BF16) -> Row:
    tensors = {"input": (dtype, (rows, hidden)), "weight": (dtype, (hidden,))}
    return Row("rms_norm", _call("norm.rms", tensors, eps=1e-5), f"{rows}×{hidden}")


def _add_rms(rows: int, hidden: int) -> Row:
    data = (BF16, (rows, hidden))
    tensors = {"input": data, "residual": data, "weight": (BF16, (hidden,))}
    return Row("add_rms_norm", _call("norm.fused_add_rms", tensors, eps=1e-5), f"{rows}×{hidden}")


def _layer(rows: int, hidden: int, dtype: str = BF16) -> Row:
    affine = (dtype, (hidden,))
    tensors = {"input": (dtype, (rows, hidden)), "weight": affine, "bias": affine}
    return Row("layer_norm", _call("norm.layer", tensors), f"{rows}×{hidden}")


def _rope(batch: int, seq: int, heads: int = 32, size: int = 128) -> Row:
    table = (F32, (8192, size // 2))
    positions = ("int64", (batch, seq))
    tensors = {"input": (BF16, (batch, seq, heads, size)), "cos": table, "sin": table, "positions": positions}
    return Row("rope", _call("posenc.rope", tensors, "BSHD"), f"{batch}×{seq} {heads}×{size}")


def _silu(rows: int, width: int, dtype: str = BF16) -> Row:
    data = (dtype, (rows, width))
    return Row("silu_mul", _call("activation.silu_mul", {"gate": data, "up": data}), f"{rows}×{width}")


def _silu_halves(rows: int, width: int) -> Row:
    """Gate and up as the halves of what one projection gives, which is how serving stacks have them."""
    row = _silu(rows, width)
    for tensor in row.call["tensors"].values():
        tensor["strides"] = [2 * width, 1]
    return replace(row, family="silu_mul_halves")


def _gelu(rows: int, width: int, approximate: str = "none", dtype: str = BF16) -> Row:
    call = _call("activation.gelu", {"input": (dtype, (rows, width))}, approximate=approximate)
    return Row("gelu", call, f"{rows}×{width} {approximate}")


def _sample(family: str, batch: int, vocab: int, uniform: bool) -> Row:
    """Without the numbers to draw by a graph would draw the same ones at every replay: then it is eager only."""
    op, params = ("sampling.topp", {"p": 0.9}) if family == "topp" else ("sampling.topk", {"k": 50})
    tensors: dict[str, tuple[str, Sequence[int]]] = {"logits": (F32, (batch, vocab))}
    if uniform:
        tensors["uniform"] = (F32, (batch,))
    shape = f"{batch}×{vocab}{' uniform' if uniform else ''}"
    return Row(family, _call(op, tensors, **params), shape, MODES if uniform else (EAGER,))


def _quantize(rows: int, cols: int, dtype: str, granularity: str) -> Row:
    call = _call("quantize", {"input": (BF16, (rows, cols))}, dtype=dtype, granularity=granularity)
    return Row("quantize", call, f"{rows}×{cols} {dtype} {granularity}")


def _prefill(heads: tuple[int, int, int], sizes: Iterable[tuple[int, int]], dtype: str = BF16) -> Iterator[Row]:
    return (_attention("prefill", batch, seq, heads, dtype=dtype) for batch, seq in sizes)


def _decode(sizes: Iterable[tuple[int, int]]) -> Iterator[Row]:
    return (_attention("decode", batch, 1, LLAMA_8B, context) for batch, context in sizes)


def _vit(batch: int) -> Row:
    return _attention("vit", batch, 197, GPT2, dtype=FP16, op="attention.full")


def _cross(batch: int, seq: int, heads: int) -> Row:
    return _attention("cross", batch, seq, (heads, heads, 64), 77, FP16, "attention.cross")


def _window(batch: int, seq: int, window: int, heads: tuple[int, int, int] = LLAMA_8B) -> Row:
    # A window of w keys is the key itself and w - 1 before it.
    return _attention("window", batch, seq, heads, note=f" w{window}", window_left=window - 1)


def _softcap(batch: int, seq: int, heads: tuple[int, int, int], softcap: float) -> Row:
    return _attention("softcap", batch, seq, heads, note=f" cap{softcap:g}", softcap=softcap)


def rows() -> list[Row]:
    """What is tuned."""
    # Scores of 32 heads at 32768 do not fit into memory, and without them nothing says what is right.
    alone = [(1, 128), (1, 512), (1, 2048), (1, 8192), (1, 16384)]
    return [
        *_prefill(LLAMA_8B, [*alone, (4, 512), (4, 2048), (16, 128), (16, 512), (16, 2048)]),
        *_prefill(LLAMA_70B, [(1, 512), (1, 2048), (1, 8192), (4, 2048)]),
        *_prefill(QWEN_7B, [(1, 512), (1, 2048), (1, 8192), (4, 2048)]),
        *_prefill(GPT2, [(1, 128), (1, 512), (8, 512), (16, 1024), (1, 32768)], FP16),
        *_prefill(WIDE, [(1, 512), (1, 2048), (4, 2048)]),
        *_prefill(LLAMA_8B, [(1, 2048)], FP16),
        *(_vit(batch) for batch in (8, 32, 64)),
        *(_cross(batch, seq, heads) for batch, seq, heads in [(2, 1024, 20), (2, 4096, 10), (8, 1024, 20)]),
        *(_window(*sizes) for sizes in [(1, 2048, 512), (8, 2048, 512), (2, 4096, 512), (1, 8192, 4096)]),
        *(_window(1, seq, 128, GPT_OSS) for seq in (2048, 8192)),
        *(_window(1, seq, 1024, GEMMA) for seq in (4096, 8192)),
        _window(1, 8192, 1024, GEMMA_27B),
        _window(1, 4096, 2047, PHI3_MINI),
        _window(1, 16384, 4096),
        *(_softcap(batch, seq, GEMMA, 50.0) for batch, seq in [(1, 1024), (2, 4096)]),
        *(_softcap(1, seq, GEMMA_27B, 50.0) for seq in (2048, 8192)),
        *(_softcap(batch, seq, LLAMA_8B, 30.0) for batch, seq in [(1, 512), (1, 2048), (2, 4096)]),
        *_decode((1, context) for context in (512, 2048, 8192, 32768)),
        *_decode((16, context) for context in (512, 2048, 8192, 32768)),
        *_decode((64, context) for context in (512, 2048, 8192)),
        *(_paged(1, context) for context in (512, 4096, 32768)),
        *(_paged(16, context) for context in (512, 4096, 32768)),
        *(_paged(64, context) for context in (512, 4096)),
        *(_paged(256, context) for context in (512, 4096)),
        *(_cascade(batch, context) for batch in (16, 64) for context in (4096, 8192)),
        *(_mla(batch, context) for batch, context in [(1, 2048), (1, 16384), (16, 2048), (16, 8192), (64, 4096)]),
        *(_rms(rows, hidden) for hidden in (4096, 8192) for rows in (1, 64, 4096)),
        _rms(4096, 4096, FP16),
        *(_add_rms(rows, hidden) for hidden in (4096, 8192) for rows in (1, 64, 4096)),
        *(_layer(rows, hidden) for hidden in (768, 1280, 4096) for rows in (1, 64, 4096)),
        *(_rope(batch, seq) for batch, seq in [(1, 1), (64, 1), (1, 64), (1, 4096)]),
        _rope(1, 4096, heads=8),
        *(_silu(rows, width) for width in (14336, 28672) for rows in (1, 64, 4096)),
        *(_silu_halves(rows, width) for width in (14336, 28672) for rows in (64, 4096)),
        *(_gelu(rows, 3072, "tanh") for rows in (64, 4096)),
        _gelu(12608, 3072, dtype=FP16),
        _gelu(4096, 5120),
        *(_sample("topp", batch, 128256, uniform) for uniform in (True, False) for batch in (1, 8, 64)),
        *(_sample("topp", batch, 151936, True) for batch in (1, 64)),
        *(_sample("topk", batch, 128256, uniform) for uniform in (True, False) for batch in (1, 64)),
        *(_sample("topk", batch, 151936, True) for batch in (1, 64)),
        *(_quantize(rows, 4096, "int8", "per_channel") for rows in (64, 4096)),
        *(_quantize(rows, 4096, "fp8_e4m3", "per_channel") for rows in (64, 4096)),
        _quantize(4096, 4096, "fp8_e4m3", "per_tensor"),
    ]


def held_out() -> list[Row]:
    """Sizes between those of :func:`rows`."""
    return [
        *_prefill(LLAMA_8B, [(1, 1024), (1, 4096), (4, 1024), (8, 1024), (16, 1024)]),
        *_prefill(QWEN_7B, [(1, 1024), (2, 2048)]),
        *_prefill(GPT2, [(4, 512)], FP16),
        _window(4, 2048, 512),
        _softcap(1, 2048, GEMMA, 50.0),
        *_decode([(1, 4096), (8, 2048), (32, 4096)]),
        *(_paged(batch, context) for batch, context in [(8, 4096), (16, 2048), (128, 2048)]),
        _mla(8, 4096),
        *(_rms(rows, hidden) for rows, hidden in [(16, 4096), (1024, 4096), (512, 8192)]),
        *(_add_rms(rows, hidden) for rows, hidden in [(16, 4096), (1024, 8192)]),
        _layer(1024, 1280),
        *(_silu(rows, width) for rows, width in [(16, 14336), (1024, 28672)]),
        _rope(1, 1024),
        _gelu(1024, 3072, "tanh"),
        _sample("topp", 32, 128256, True),
        _sample("topk", 16, 128256, True),
        _quantize(1024, 4096, "int8", "per_channel"),
    ]


def families() -> list[str]:
    """Every family, in the order of the table."""
    return list(dict.fromkeys(row.family for row in rows()))


def quick(chosen: Iterable[Row]) -> list[Row]:
    """The first two of each family."""
    taken: dict[str, int] = {}
    few = []
    for row in chosen:
        taken[row.family] = taken.get(row.family, 0) + 1
        if taken[row.family] <= 2:
            few.append(row)
    return few
