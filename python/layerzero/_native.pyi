# Written by scripts/stubs.py from the operations' schemas; `make stubs` writes it again.
"""The native half of the package: the functions people call, and what the rest of the package is built on."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final, overload

from numpy.typing import NDArray
from torch import Generator, Tensor

from layerzero.arrays import Quantized
from layerzero.inspection import Reason
from layerzero.packing import PackedWeight

class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

# Tensors in, tensors out; numpy arrays in, numpy arrays out; any other DLPack producer in, tensors out. The arrays of a
# call are of one kind.
_Array = TypeVar("_Array", Tensor, NDArray[Any], _DLPack)

# A kernel's id, the function that runs it, and the names of that function's parameters.
_Adapter: TypeAlias = tuple[str, Callable[..., Any], list[str]]

__all__ = [
    "Checkpoint",
    "DeviceGraph",
    "Graph",
    "Overlay",
    "Plan",
    "Session",
    "Subject",
    "TextCall",
    "__version__",
    "after_fork",
    "after_fork_in_child",
    "alibi_bias",
    "allocations",
    "attention",
    "attention_lse",
    "backends",
    "before_fork",
    "busy",
    "call_inputs",
    "calls_made",
    "checkpoint",
    "cli",
    "configure",
    "cross_attention",
    "default_layouts",
    "dequantize",
    "device_name",
    "device_number",
    "devices",
    "disable",
    "document",
    "embedding",
    "end",
    "exchange_capture_mode",
    "explain",
    "explain_call",
    "explain_to_compile",
    "forget_failures",
    "functions",
    "fused_add_rms_norm",
    "fused_mlp",
    "gelu",
    "graph_captured",
    "graph_hold",
    "graph_release",
    "graph_wanted",
    "health",
    "hold_changes",
    "inner",
    "jit_begin",
    "jit_done",
    "jit_failed",
    "jit_forked",
    "jit_next",
    "jit_wanted",
    "kv_append",
    "kv_compact",
    "layer_norm",
    "learn",
    "linear",
    "linear_packed",
    "linear_quantized",
    "list_kernels",
    "load_backend",
    "load_config",
    "load_sources",
    "load_table",
    "load_warm",
    "lock",
    "lockfile",
    "manifest",
    "may_explain",
    "measure",
    "merge_states",
    "mla_attention",
    "overlay",
    "packed_weights",
    "paged_attention",
    "paged_attention_lse",
    "perfdb_warnings",
    "pin_warnings",
    "plan_call",
    "quantize",
    "read_manifest",
    "readiness",
    "rearm",
    "recording",
    "refresh_memory",
    "register",
    "reload",
    "replay",
    "requested_calls",
    "reset",
    "restore",
    "rms_norm",
    "rope",
    "run_kernel",
    "sample_topk",
    "sample_topp",
    "save_manifest",
    "schema",
    "set_launch_limits",
    "settings",
    "settle_changes",
    "settle_names",
    "silu_mul",
    "softmax",
    "solve",
    "sparse_attention",
    "speculative_verify",
    "status",
    "text_operation",
    "time_host_by_events",
    "tokenizer_settings",
    "unlock",
    "unpin",
    "unregister",
    "use_context_variable",
    "validate",
    "varlen_attention",
    "varlen_attention_lse",
    "which",
    "write_file",
]

__version__: str

@final
class Graph:
    """A model as a graph of operations."""

    @staticmethod
    def from_document(text: str, constants: Sequence[Any]) -> Graph: ...
    def interpret(
        self, inputs: Sequence[Any], host: Callable[[int, list[Any]], Any] | None = None
    ) -> tuple[list[Any], list[Any]]: ...
    def __len__(self) -> int: ...
    @property
    def inputs(self) -> list[tuple[str, str, list[int | str]]]: ...
    @property
    def operations(self) -> list[str]: ...
    @property
    def outputs(self) -> list[tuple[str, str, list[int | str]]]: ...
    @property
    def symbols(self) -> list[tuple[str, int, int | None]]: ...
    @property
    def updates(self) -> list[str]: ...

@final
class Plan:
    """The decisions of a plan: those of a dispatch table, in force for the calls made inside."""

    def __new__(cls, text: str, name: str, learns: bool) -> Plan: ...
    def learned(self, onto: Plan) -> Plan | None: ...
    def mismatches(self) -> str: ...
    def noted(self) -> list[tuple[str, int]]: ...
    def table(self) -> str: ...

@final
class DeviceGraph:
    """A graph that was optimised, and whose nodes Python runs on a device."""

    def __new__(cls, graph: Graph, *, off: Sequence[str] = ...) -> DeviceGraph: ...
    def constant(self, name: str) -> Any: ...
    def dot(self) -> str: ...
    def nodes(self, inputs: Sequence[tuple[str, Sequence[int]]]) -> list[dict[str, Any]]: ...
    def text(self) -> str: ...
    @property
    def inputs(self) -> list[str]: ...
    @property
    def optimised(self) -> dict[str, Any]: ...
    @property
    def outputs(self) -> list[str]: ...
    @property
    def updates(self) -> list[tuple[str, str]]: ...

@final
class Session:
    """A graph that was optimised, and is compiled for each size of its inputs at the first use."""

    def __new__(
        cls,
        graph: Graph,
        *,
        threads: int,
        off: Sequence[str] = ...,
        tune: bool = False,
        weights: str = "float32",
        precision: str = "highest",
        share: Session | None = None,
    ) -> Session: ...
    def arena(self, inputs: Sequence[Any]) -> int: ...
    def dot(self) -> str: ...
    def failures(self, inputs: Sequence[Any]) -> list[tuple[str, str, str]]: ...
    @staticmethod
    def passes() -> list[str]: ...
    def profile(
        self, inputs: Sequence[Any], rounds: int, host: Callable[[int, list[Any]], Any] | None = None
    ) -> list[dict[str, Any]]: ...
    def quick(self, inputs: tuple[Any, ...]) -> Any: ...
    def run(self, inputs: Sequence[Any], host: Callable[[int, list[Any]], Any] | None = None) -> list[Any]: ...
    def steps(self, inputs: Sequence[Any]) -> list[dict[str, Any]]: ...
    def text(self) -> str: ...
    @property
    def optimised(self) -> dict[str, Any]: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def plans(self) -> int: ...
    @property
    def source_bytes(self) -> int: ...

@final
class Checkpoint:
    """What is registered and configured at a moment."""

@final
class Overlay:
    """What the calls of a ``with`` block, or of a plan, are made in."""

    @property
    def number(self) -> int: ...

@final
class Subject:
    """The arguments of one call, on which kernels are run one by one, whatever the ranking."""

    def __new__(cls, function: str, kwargs: dict[str, Any], legal: bool = False) -> Subject: ...
    def run(self, kernel: str) -> Any: ...
    def time(self, kernel: str, calls: int) -> float: ...
    def time_between(
        self, kernel: str, calls: int, before: Callable[[], object], after: Callable[[], float]
    ) -> list[float]: ...

@final
class TextCall:
    """A call on texts, but for the texts."""

    def __new__(
        cls, op: str, identity: dict[str, Any], tokenizer: Any, own: str, refused: Sequence[tuple[str, str]]
    ) -> TextCall: ...
    def run(self, texts: list[Any], length: int, only: str | None = None) -> Any: ...
    def which(self, texts: int, length: int) -> dict[str, Any]: ...
    def explain(self, texts: int, length: int) -> tuple[str, str]: ...
    def validate(self, kernel: str, texts: int, length: int) -> list[Reason]: ...

@overload
def attention(
    query: _Array,
    key: _Array,
    value: _Array,
    causal: bool = True,
    scale: float | None = None,
    *,
    attn_mask: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: Literal[False] | None = None,
    layout: str | None = None,
    out: _Array | None = None,
) -> _Array:
    """Softmax attention: standard or grouped-query by head counts, prefill or decode by query length.

    scores = scale * q.k^T (softcapped, plus slope * -|distance|, plus or masked by attn_mask); keys outside the causal
    bound or the window get no weight; out = softmax(scores).v. Causal and windows are aligned bottom-right: query i
    stands at key position i + seq_k - seq_q, and a causal call has at least as many keys as queries. A query that may
    attend to nothing gives zeros. sinks is a score per head that joins the softmax and has no value: weights are
    exp(scores) / (sum(exp(scores)) + exp(sink)). Each group of heads/kv_heads query heads shares one key/value head. A
    NaN that takes part gives NaN; a NaN or infinity among keys or values that get no weight may reach further rows,
    since kernels multiply it by zero.

    Edge cases:
        - Case: all scores of a query are NaN: it holds a NaN, or every key it attends to does.
          Result: NaN for that query.
          Exception: with fewer than 16 keys torch's fused kernel for the CPU gives zeros; under a mask that leaves such
              a query nothing it gives NaN instead of zeros.
        - Case: a score is plus infinity: of infinite queries or keys, or products beyond float32's range.
          Result: NaN for that query.
          Exception: torch's fused kernel for the CPU gives zeros in float16 and bfloat16.
        - Case: scale is closer to 0 than float32's smallest normal number, 2^-126.
          Result: the scores by the definition, which in float32 or narrower are 0: keys that may be attended to weigh
              the same.
        - Case: gradients of key and value are wanted in float16 or bfloat16.
          Result: sums over more than 4096 queries are made in float32.
          Exception: fused kernels round weights to the dtype first; torch's for the CPU also rounds the sum after every
              256 of up to 4096 queries.

    Args:
        query: tensor (batch, seq_q, heads, head_dim) as BSHD or (batch, heads, seq_q, head_dim) as BHSD; float64,
            float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. Also: q.
        key: tensor (batch, seq_k, kv_heads, head_dim) as BSHD or (batch, kv_heads, seq_k, head_dim) as BHSD; the dtype
            of query. Also: k.
        value: tensor (batch, seq_k, kv_heads, v_dim) as BSHD or (batch, kv_heads, seq_k, v_dim) as BHSD; the dtype of
            query. Also: v.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        attn_mask: tensor (batch or 1, heads or 1, seq_q or 1, seq_k) or (seq_q or 1, seq_k); float64, float32, float16,
            bfloat16, bool, optional.
        alibi_slopes: tensor (heads,); float64, float32, float16, bfloat16, optional.
        sinks: tensor (heads,); float64, float32, float16, bfloat16, optional. Also: s_aux, learnable_sink.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        dropout_p: probability that an attention weight is dropped (training).
        seed: seed of the draws.
        return_lse: whether to give (output, lse): with the natural logarithm of each softmax's sum, in float32.
        layout: the order of the dimensions; BSHD when not given, or what default_layout says.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (batch, seq_q, heads, v_dim) as BSHD or (batch, heads, seq_q, v_dim) as BHSD.

    Operations: attention.standard.decode, attention.standard.prefill, attention.gqa.decode, attention.gqa.prefill. See
    which kernel runs with lz.which and lz.explain.
    """

@overload
def attention(
    query: _Array,
    key: _Array,
    value: _Array,
    causal: bool = True,
    scale: float | None = None,
    *,
    attn_mask: _Array | None = None,
    alibi_slopes: _Array | None = None,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: Literal[True],
    layout: str | None = None,
    out: _Array | None = None,
) -> tuple[_Array, _Array]: ...
def cross_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    scale: float | None = None,
    *,
    attn_mask: _Array | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str | None = None,
    out: _Array | None = None,
) -> _Array:
    """Softmax attention to another sequence, prefill or decode by query length.

    out = softmax(scale * q.k^T + mask).v with keys and values of another sequence (an encoder's); never causal

    Edge cases:
        - Case: all scores of a query are NaN: it holds a NaN, or every key it attends to does.
          Result: NaN for that query.
          Exception: with fewer than 16 keys torch's fused kernel for the CPU gives zeros; under a mask that leaves such
              a query nothing it gives NaN instead of zeros.
        - Case: a score is plus infinity: of infinite queries or keys, or products beyond float32's range.
          Result: NaN for that query.
          Exception: torch's fused kernel for the CPU gives zeros in float16 and bfloat16.
        - Case: scale is closer to 0 than float32's smallest normal number, 2^-126.
          Result: the scores by the definition, which in float32 or narrower are 0: keys that may be attended to weigh
              the same.
        - Case: gradients of key and value are wanted in float16 or bfloat16.
          Result: sums over more than 4096 queries are made in float32.
          Exception: fused kernels round weights to the dtype first; torch's for the CPU also rounds the sum after every
              256 of up to 4096 queries.

    Args:
        query: tensor (batch, seq_q, heads, head_dim) as BSHD or (batch, heads, seq_q, head_dim) as BHSD; float64,
            float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. Also: q.
        key: tensor (batch, seq_k, kv_heads, head_dim) as BSHD or (batch, kv_heads, seq_k, head_dim) as BHSD; the dtype
            of query. Also: k.
        value: tensor (batch, seq_k, kv_heads, v_dim) as BSHD or (batch, kv_heads, seq_k, v_dim) as BHSD; the dtype of
            query. Also: v.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        attn_mask: tensor (batch or 1, heads or 1, seq_q or 1, seq_k) or (seq_q or 1, seq_k); float64, float32, float16,
            bfloat16, bool, optional.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        dropout_p: probability that an attention weight is dropped (training).
        seed: seed of the draws.
        layout: the order of the dimensions; BSHD when not given, or what default_layout says.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (batch, seq_q, heads, v_dim) as BSHD or (batch, heads, seq_q, v_dim) as BHSD.

    Operations: attention.cross.decode, attention.cross.prefill. See which kernel runs with lz.which and lz.explain.
    """

@overload
def varlen_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    cu_seqlens_q: _Array,
    cu_seqlens_k: _Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    causal: bool = True,
    scale: float | None = None,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    return_lse: Literal[False] | None = None,
    out: _Array | None = None,
) -> _Array:
    """Softmax attention within packed sequences of different lengths, standard or grouped-query.

    sequences are packed along the first dimension, without padding: sequence b owns the query rows cu_seqlens_q[b] ..
    cu_seqlens_q[b+1] and the key and value rows cu_seqlens_k[b] .. cu_seqlens_k[b+1]. Each is attended to as by dense
    attention: scores = scale * q.k^T (softcapped), keys outside the causal bound or the window get no weight, out =
    softmax(scores).v. Causal and windows are aligned bottom-right within each sequence. A query that may attend to
    nothing gives zeros, and so does a row of no sequence. sinks join the softmax as in dense attention. max_seqlen_q
    and max_seqlen_k promise that no sequence is longer; a call that breaks them is refused, but not in a CUDA graph,
    where the lengths cannot be read.

    Args:
        query: tensor (seq_q, heads, head_dim); float64, float32, float16, bfloat16. Also: q.
        key: tensor (seq_k, kv_heads, head_dim); the dtype of query. Also: k.
        value: tensor (seq_k, kv_heads, v_dim); the dtype of query. Also: v.
        cu_seqlens_q: tensor (batch + 1,); int64, int32. Also: qo_indptr, cu_seq_q.
        cu_seqlens_k: tensor (batch + 1,); int64, int32. Also: kv_indptr, cu_seq_k.
        max_seqlen_q: no sequence has more queries than this; 0 if not known. A promise that kernels may use, and on
            which no result depends. Also: max_q.
        max_seqlen_k: no sequence has more keys than this; 0 if not known. A promise that kernels may use, and on which
            no result depends. Also: max_k.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        sinks: tensor (heads,); float64, float32, float16, bfloat16, optional. Also: s_aux, learnable_sink.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        return_lse: whether to give (output, lse): with the natural logarithm of each softmax's sum, in float32.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (seq_q, heads, v_dim).

    Operations: attention.standard.prefill.varlen, attention.gqa.prefill.varlen. See which kernel runs with lz.which and
    lz.explain.
    """

@overload
def varlen_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    cu_seqlens_q: _Array,
    cu_seqlens_k: _Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    causal: bool = True,
    scale: float | None = None,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    return_lse: Literal[True],
    out: _Array | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def paged_attention(
    query: _Array,
    key_cache: _Array,
    value_cache: _Array,
    block_tables: _Array,
    context_lens: _Array,
    scale: float | None = None,
    *,
    cu_seqlens_q: _Array | None = None,
    causal: bool = True,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    shared_prefix: int = 0,
    return_lse: Literal[False] | None = None,
    layout: str | None = None,
    out: _Array | None = None,
) -> _Array:
    """Softmax attention over a paged cache: standard or grouped-query, decode or packed prefill.

    attention.standard.decode.paged, attention.gqa.decode.paged: sequence b's keys are the first context_lens[b] slots
    of the pages block_tables[b, 0..]; its one query attends to all of them (within the window); no key comes after it,
    so causal and the right side of the window change nothing. A context length of 0 gives zeros. sinks join the softmax
    as in dense attention. Page indices beyond the context are not read. shared_prefix promises that no context is
    shorter than that, and that the first shared_prefix // block_size columns of block_tables are the same in all rows;
    a kernel that relies on it refuses a call that breaks it.

    attention.standard.prefill.paged, attention.gqa.prefill.paged: queries are packed along the first dimension;
    sequence b owns rows cu_seqlens_q[b] .. cu_seqlens_q[b+1], which are the last positions of its context_lens[b]
    cached tokens (bottom-right aligned). sinks join the softmax as in dense attention. shared_prefix is the promise it
    is in decoding.

    Args:
        query: tensor (batch, heads, head_dim) or (batch, 1, heads, head_dim) or (seq_q, heads, head_dim); float64,
            float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. Also: q.
        key_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        value_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; the dtype of key_cache.
        block_tables: tensor (batch, max_blocks); int64, int32.
        context_lens: tensor (batch,); int64, int32. Also: seq_lens.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        cu_seqlens_q: tensor (batch + 1,); int64, int32. Also: qo_indptr.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        sinks: tensor (heads,); float64, float32, float16, bfloat16, optional. Also: s_aux, learnable_sink.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        shared_prefix: how many cached tokens all sequences begin with, in the same pages; a promise that kernels may
            use, and on which no result depends.
        return_lse: whether to give (output, lse): with the natural logarithm of each softmax's sum, in float32.
        layout: the order of the dimensions; NHD when not given, or what default_cache_layout says.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like query.

    Operations: attention.standard.decode.paged, attention.standard.prefill.paged, attention.gqa.decode.paged,
    attention.gqa.prefill.paged. See which kernel runs with lz.which and lz.explain.
    """

@overload
def paged_attention(
    query: _Array,
    key_cache: _Array,
    value_cache: _Array,
    block_tables: _Array,
    context_lens: _Array,
    scale: float | None = None,
    *,
    cu_seqlens_q: _Array | None = None,
    causal: bool = True,
    sinks: _Array | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    shared_prefix: int = 0,
    return_lse: Literal[True],
    layout: str | None = None,
    out: _Array | None = None,
) -> tuple[_Array, _Array]: ...
def attention_lse(
    query: _Array,
    key: _Array,
    value: _Array,
    causal: bool = True,
    scale: float | None = None,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    layout: str | None = None,
) -> tuple[_Array, _Array]:
    """Dense attention with the log-sum-exp of the scores, standard or grouped-query.

    as dense attention, and lse = log(sum(exp(scores))) of each query and head: the natural logarithm, in float32, in
    the order of the output without its last dimension. A query that may attend to nothing gives zeros and minus
    infinity.

    Args:
        query: tensor (batch, seq_q, heads, head_dim) as BSHD or (batch, heads, seq_q, head_dim) as BHSD; float64,
            float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. Also: q.
        key: tensor (batch, seq_k, kv_heads, head_dim) as BSHD or (batch, kv_heads, seq_k, head_dim) as BHSD; the dtype
            of query. Also: k.
        value: tensor (batch, seq_k, kv_heads, v_dim) as BSHD or (batch, kv_heads, seq_k, v_dim) as BHSD; the dtype of
            query. Also: v.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        layout: the order of the dimensions; BSHD when not given, or what default_layout says.

    Returns:
        output: tensor (batch, seq_q, heads, v_dim) as BSHD or (batch, heads, seq_q, v_dim) as BHSD.
        lse: tensor (batch, seq_q, heads) as BSHD or (batch, heads, seq_q) as BHSD.

    Operations: attention.lse. See which kernel runs with lz.which and lz.explain.
    """

def varlen_attention_lse(
    query: _Array,
    key: _Array,
    value: _Array,
    cu_seqlens_q: _Array,
    cu_seqlens_k: _Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
) -> tuple[_Array, _Array]:
    """Attention within packed sequences with the log-sum-exp of the scores.

    as attention within packed sequences, and lse = log(sum(exp(scores))) of each query and head, the natural logarithm
    in float32. A query that may attend to nothing, and a row of no sequence, gives zeros and minus infinity.

    Args:
        query: tensor (seq_q, heads, head_dim); float64, float32, float16, bfloat16. Also: q.
        key: tensor (seq_k, kv_heads, head_dim); the dtype of query. Also: k.
        value: tensor (seq_k, kv_heads, v_dim); the dtype of query. Also: v.
        cu_seqlens_q: tensor (batch + 1,); int64, int32. Also: qo_indptr, cu_seq_q.
        cu_seqlens_k: tensor (batch + 1,); int64, int32. Also: kv_indptr, cu_seq_k.
        max_seqlen_q: no sequence has more queries than this; 0 if not known. A promise that kernels may use, and on
            which no result depends. Also: max_q.
        max_seqlen_k: no sequence has more keys than this; 0 if not known. A promise that kernels may use, and on which
            no result depends. Also: max_k.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.

    Returns:
        output: tensor (seq_q, heads, v_dim).
        lse: tensor (seq_q, heads).

    Operations: attention.lse.varlen. See which kernel runs with lz.which and lz.explain.
    """

def paged_attention_lse(
    query: _Array,
    key_cache: _Array,
    value_cache: _Array,
    block_tables: _Array,
    context_lens: _Array,
    scale: float | None = None,
    *,
    cu_seqlens_q: _Array | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    layout: str | None = None,
) -> tuple[_Array, _Array]:
    """Attention over a paged cache with the log-sum-exp of the scores.

    as attention over a paged cache, and lse = log(sum(exp(scores))) of each query and head, the natural logarithm in
    float32. With cu_seqlens_q queries are packed, and are the last positions of their sequences; without it each
    sequence has one. A query that may attend to nothing, and a row of no sequence, gives zeros and minus infinity.

    Args:
        query: tensor (seq_q, heads, head_dim) or (seq_q, 1, heads, head_dim); float64, float32, float16, bfloat16,
            float8_e4m3fn, float8_e5m2. Also: q.
        key_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        value_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; the dtype of key_cache.
        block_tables: tensor (batch, max_blocks); int64, int32.
        context_lens: tensor (batch,); int64, int32. Also: seq_lens.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        cu_seqlens_q: tensor (batch + 1,); int64, int32, optional. Also: qo_indptr.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        window: how many earlier keys a query may attend to, or (earlier, later); all when not given. Also: window_size.
        softcap: scores become softcap * tanh(scores / softcap); 0 turns it off.
        layout: the order of the dimensions; NHD when not given, or what default_cache_layout says.

    Returns:
        output: tensor shaped like query.
        lse: tensor shaped like query without its last dimension.

    Operations: attention.lse.paged. See which kernel runs with lz.which and lz.explain.
    """

def merge_states(out_a: _Array, lse_a: _Array, out_b: _Array, lse_b: _Array) -> tuple[_Array, _Array]:
    """One attention out of two over different keys, each with its log-sum-exp.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b: what attention to
    both sets of keys gives. The logarithms are natural, as attention gives them with return_lse; logarithms to base 2,
    as FlashInfer's, must be multiplied by ln(2) first. A part with lse minus infinity takes no part; where both have
    it, the result is zeros and minus infinity.

    Args:
        out_a: tensor (..., v_dim); float64, float32, float16, bfloat16.
        lse_a: tensor (...,); float32.
        out_b: tensor (..., v_dim); the dtype of out_a.
        lse_b: tensor (...,); float32.

    Returns:
        output: tensor shaped like out_a.
        lse: tensor shaped like lse_a.

    Operations: attention.merge. See which kernel runs with lz.which and lz.explain.
    """

def mla_attention(
    q_nope: _Array,
    q_pe: _Array,
    ckv: _Array,
    kpe: _Array,
    scale: float,
    *,
    causal: bool = True,
    qo_indptr: _Array | None = None,
    kv_indptr: _Array | None = None,
    block_tables: _Array | None = None,
    context_lens: _Array | None = None,
    out: _Array | None = None,
) -> _Array:
    """Multi-head latent attention over compressed keys and values, contiguous or paged.

    attention.mla.decode.paged: as attention.mla.decode, one query per sequence; sequence b's latent keys are the first
    context_lens[b] slots of the pages block_tables[b, 0..]

    attention.mla.prefill.paged: as attention.mla.decode.paged, with packed queries: sequence b owns the query rows
    qo_indptr[b] .. qo_indptr[b+1], which are the last positions of its context_lens[b] cached tokens. Causal is bottom-
    right aligned within each sequence. A query that may attend to nothing, and a row of no sequence, gives zeros.

    attention.mla.decode, attention.mla.prefill: scores = scale * (q_nope.ckv^T + q_pe.kpe^T), out =
    softmax(scores).ckv, with the projections absorbed into q_nope. Without indptrs all tokens belong to one sequence;
    with them sequence b owns query rows qo_indptr[b].. and key rows kv_indptr[b]... Causal is bottom-right aligned
    within each sequence.

    Args:
        q_nope: tensor (batch, heads, dim_ckv) or (seq_q, heads, dim_ckv); float64, float32, float16, bfloat16.
        q_pe: tensor (batch, heads, dim_kpe) or (seq_q, heads, dim_kpe); the dtype of q_nope.
        ckv: tensor (num_blocks, block_size, dim_ckv) or (seq_k, 1, dim_ckv) or (seq_k, dim_ckv); float64, float32,
            float16, bfloat16, float8_e4m3fn, float8_e5m2.
        kpe: tensor (num_blocks, block_size, dim_kpe) or (seq_k, 1, dim_kpe) or (seq_k, dim_kpe); the dtype of
            ckv_cache.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        causal: query i attends to keys up to i + seq_k - seq_q. Also: is_causal.
        qo_indptr: tensor (batch + 1,); int64, int32. Also: cu_seqlens_q.
        kv_indptr: tensor (batch + 1,); int64, int32, optional.
        block_tables: tensor (batch, max_blocks); int64, int32.
        context_lens: tensor (batch,); int64, int32. Also: seq_lens.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like q_nope.

    Operations: attention.mla.decode.paged, attention.mla.prefill.paged, attention.mla.decode, attention.mla.prefill.
    See which kernel runs with lz.which and lz.explain.
    """

def sparse_attention(
    query: _Array,
    key: _Array,
    value: _Array,
    *,
    indptr: _Array | None = None,
    indices: _Array | None = None,
    block_rows: int | None = None,
    block_cols: int | None = None,
    block_mask: _Array | None = None,
    block_row_sizes: _Array | None = None,
    block_col_sizes: _Array | None = None,
    scale: float | None = None,
    layout: str | None = None,
    out: _Array | None = None,
) -> _Array:
    """Softmax attention within blocks: listed ones of one size, or a mask of blocks of many sizes.

    attention.sparse.block: query rows [i*R, (i+1)*R) attend to key rows [j*C, (j+1)*C) for the block columns j listed
    in indices[indptr[i] .. indptr[i+1]], and to nothing else; a row with no block gives zeros

    attention.sparse.variable_block: for key/value head h, block row i covers the next block_row_sizes[h, i] queries and
    block column j the next block_col_sizes[h, j] keys; they attend exactly where block_mask[h, i, j] is true; a row
    with no block gives zeros

    Args:
        query: tensor (seq_q, heads, head_dim) or (heads, seq_q, head_dim) as HND or (seq_q, heads, head_dim) as NHD;
            float64, float32, float16, bfloat16. Also: q.
        key: tensor (seq_k, kv_heads, head_dim) or (kv_heads, seq_k, head_dim) as HND or (seq_k, kv_heads, head_dim) as
            NHD; the dtype of query. Also: k.
        value: tensor (seq_k, kv_heads, head_dim) or (kv_heads, seq_k, head_dim) as HND or (seq_k, kv_heads, head_dim)
            as NHD; the dtype of query. Also: v.
        indptr: tensor (row_blocks + 1,); int64, int32.
        indices: tensor (nnz,); int64, int32.
        block_rows: query rows per block. Also: R.
        block_cols: key rows per block. Also: C.
        block_mask: tensor (kv_heads, row_blocks, col_blocks); bool.
        block_row_sizes: tensor (kv_heads, row_blocks); int64, int32.
        block_col_sizes: tensor (kv_heads, col_blocks); int64, int32.
        scale: softmax scale; 1/sqrt(head_dim) when not given. Also: sm_scale, softmax_scale.
        layout: the order of the dimensions; HND when not given.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like query.

    Operations: attention.sparse.block, attention.sparse.variable_block. See which kernel runs with lz.which and
    lz.explain.
    """

def embedding(indices: _Array, weight: _Array, *, out: _Array | None = None) -> _Array:
    """Rows of a table by index.

    out[i] = weight[indices[i]]; an index outside the table is an error

    Edge cases:
        - Case: the gradient of weight is wanted in float16 or bfloat16.
          Result: the gradients of equal indices are summed in float32 and rounded once.
          Exception: torch's backward for CUDA rounds the sum more than once for small numbers of indices (seen at 2048,
              not at 4096).

    Args:
        indices: tensor (...,); int64, int32. Also: input, input_ids.
        weight: tensor (vocab, hidden); float64, float32, float16, bfloat16.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (..., hidden).

    Operations: embedding.lookup. See which kernel runs with lz.which and lz.explain.
    """

def rope(
    input: _Array,
    cos: _Array,
    sin: _Array,
    interleaved: bool = False,
    *,
    positions: _Array | None = None,
    layout: str | None = None,
    out: _Array | None = None,
) -> _Array:
    """Rotary positional embedding from precomputed cosines and sines.

    pair (a, b) at position p becomes (a cos - b sin, b cos + a sin). The tables have one column per rotated pair (the
    first 2 * rot dimensions are rotated), or head_dim columns of which the first half is used. Pairs are (i, i + half),
    or (2i, 2i + 1) when interleaved. Position p is the index in the sequence unless positions are given.

    Args:
        input: tensor (batch, seq, heads, head_dim) as BSHD or (batch, heads, seq, head_dim) as BHSD or (seq, heads,
            head_dim) as NHD; float64, float32, float16, bfloat16. Also: x.
        cos: tensor (table, rot); float64, float32, float16, bfloat16.
        sin: tensor (table, rot); the dtype of cos.
        interleaved: pairs are neighbours instead of half a head apart.
        positions: tensor (batch or 1, seq) or (seq,); int64, int32, optional. Also: position_ids.
        layout: the order of the dimensions; BSHD when not given, or what default_layout says.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like input.

    Operations: posenc.rope. See which kernel runs with lz.which and lz.explain.
    """

def alibi_bias(slopes: _Array, seq_q: int, seq_k: int, *, out: _Array | None = None) -> _Array:
    """Linear bias by distance, one slope per head.

    out[h, i, j] = -slopes[h] * |i + seq_k - seq_q - j|, queries aligned bottom-right

    Args:
        slopes: tensor (heads,); float64, float32, float16, bfloat16.
        seq_q: number of queries.
        seq_k: number of keys.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (heads, seq_q, seq_k).

    Operations: posenc.alibi. See which kernel runs with lz.which and lz.explain.
    """

def rms_norm(input: _Array, weight: _Array | None = None, eps: float = 1e-06, *, out: _Array | None = None) -> _Array:
    """Root-mean-square normalization.

    out = x / sqrt(mean(x^2) + eps) * weight, over the last dimension

    Edge cases:
        - Case: eps is below 1e-30, and squares of the numbers are below float32's range.
          Result: the result by the definition, computed in float64.
          Exception: kernels for GPUs square in float32, where a mean square below 1e-38 may become 0.
        - Case: squares of the numbers of a row are beyond float32's range: numbers from about 1e19.
          Result: the result by the definition.
          Exception: kernels that square in float32 give zeros or NaN in that row.
        - Case: gradients are wanted in float16 or bfloat16.
          Result: sums over the rows (the gradients of weight and bias) are made in float32 and rounded once.
          Exception: kernels of other libraries for GPUs sum as these do.

    Args:
        input: tensor (..., hidden); float64, float32, float16, bfloat16. Also: x.
        weight: tensor (hidden,); float64, float32, float16, bfloat16, optional.
        eps: added to the mean square.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like input.

    Operations: norm.rms. See which kernel runs with lz.which and lz.explain.
    """

def layer_norm(
    input: _Array,
    normalized_shape: int | Sequence[int] | None = None,
    weight: _Array | None = None,
    bias: _Array | None = None,
    eps: float = 1e-05,
    *,
    out: _Array | None = None,
) -> _Array:
    """Layer normalization.

    out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, biased variance

    Edge cases:
        - Case: eps is below 1e-30, and squares of the numbers are below float32's range.
          Result: the result by the definition, computed in float64.
          Exception: kernels for GPUs square in float32, where a mean square below 1e-38 may become 0.
        - Case: squares of the numbers of a row are beyond float32's range: numbers from about 1e19.
          Result: the result by the definition.
          Exception: kernels that square in float32 give zeros or NaN in that row.
        - Case: gradients are wanted in float16 or bfloat16.
          Result: sums over the rows (the gradients of weight and bias) are made in float32 and rounded once.
          Exception: kernels of other libraries for GPUs sum as these do.

    Args:
        input: tensor (..., hidden); float64, float32, float16, bfloat16. Also: x.
        normalized_shape: sizes of the trailing dimensions to normalize over; the last one when not given.
        weight: tensor (hidden,); float64, float32, float16, bfloat16, optional.
        bias: tensor (hidden,); float64, float32, float16, bfloat16, optional.
        eps: added to the variance.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like input.

    Operations: norm.layer. See which kernel runs with lz.which and lz.explain.
    """

def fused_add_rms_norm(
    input: _Array, residual: _Array, weight: _Array | None = None, eps: float = 1e-06
) -> tuple[_Array, _Array]:
    """Adds the residual, then normalizes; gives both.

    s = input + residual; output = s / sqrt(mean(s^2) + eps) * weight; residual_out = s, rounded to the input's dtype

    Edge cases:
        - Case: eps is below 1e-30, and squares of the numbers are below float32's range.
          Result: the result by the definition, computed in float64.
          Exception: kernels for GPUs square in float32, where a mean square below 1e-38 may become 0.
        - Case: squares of the numbers of a row are beyond float32's range: numbers from about 1e19.
          Result: the result by the definition.
          Exception: kernels that square in float32 give zeros or NaN in that row.
        - Case: gradients are wanted in float16 or bfloat16.
          Result: sums over the rows (the gradients of weight and bias) are made in float32 and rounded once.
          Exception: kernels of other libraries for GPUs sum as these do.

    Args:
        input: tensor (..., hidden); float64, float32, float16, bfloat16. Also: x.
        residual: tensor (..., hidden); the dtype of input.
        weight: tensor (hidden,); float64, float32, float16, bfloat16, optional.
        eps: added to the mean square.

    Returns:
        output: tensor shaped like input.
        residual_out: tensor shaped like input.

    Operations: norm.fused_add_rms. See which kernel runs with lz.which and lz.explain.
    """

def linear(
    input: _Array, weight: _Array | PackedWeight, bias: _Array | None = None, *, out: _Array | None = None
) -> _Array:
    """Matrix product with a weight stored [out, in], plus bias.

    out = input . weight^T + bias

    Edge cases:
        - Case: the dtype is float16 or bfloat16, and bias is given.
          Result: the product is not rounded before the bias is added, whatever the strides.
          Exception: torch's kernel for CUDA rounds it for a single row of bfloat16.

    Args:
        input: tensor (..., in_features); float64, float32, float16, bfloat16. Also: x.
        weight: tensor (out_features, in_features); the dtype of input.
        bias: tensor (out_features,); the dtype of input, optional.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (..., out_features).

    Operations: mlp.linear. See which kernel runs with lz.which and lz.explain.
    """

def linear_packed(
    input: _Array,
    weight: _Array | PackedWeight,
    bias: _Array | None = None,
    *,
    out_features: int = ...,
    interleave: int = 1,
    activation: str = "none",
    out: _Array | None = None,
) -> _Array:
    """Linear layer with a weight in the blocks that lz.pack makes, then an activation.

    out = act(input . W^T + bias), with W[n, k] = weight[n / 32, k / interleave, n % 32, k % interleave]; what pads the
    blocks is not looked at

    Edge cases:
        - Case: the dtype is float16 or bfloat16.
          Result: neither the product nor its sum with the bias is rounded before the activation.

    Args:
        input: tensor (..., in_features); float64, float32, float16, bfloat16. Also: x.
        weight: tensor (panels, groups, 32, interleave); the dtype of input.
        bias: tensor (out_features,); the dtype of input, optional.
        out_features: rows of the weight before it was packed.
        interleave: input features side by side: 1, 2 for bfloat16, 4 for int8.
        activation: applied to the sum: none, relu, gelu, gelu_tanh, silu.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (..., out_features).

    Operations: mlp.linear.packed. See which kernel runs with lz.which and lz.explain.
    """

def linear_quantized(
    input: _Array,
    weight: _Array | PackedWeight,
    bias: _Array | None = None,
    *,
    scales: _Array = ...,
    out_features: int = ...,
    interleave: int = 1,
    group_size: int = 0,
    activation: str = "none",
    out: _Array | None = None,
) -> _Array:
    """Linear layer with a weight of 8-bit or 4-bit integers in the blocks that lz.pack makes, then an activation.

    out = act(input . W^T + bias), with W[n, k] = scales[n / 32, k / group_size, n % 32] * weight[n / 32, k /
    interleave, n % 32, k % interleave]; a group_size of 0 is one scale for each output. A weight of uint8 holds two
    4-bit integers in two's complement per byte, the lower four bits first: W[n, k] is in byte k / 2 % interleave of
    group k / (2 * interleave). What pads the blocks is not looked at

    Edge cases:
        - Case: the dtype is float16 or bfloat16.
          Result: neither the weight nor the product nor its sum with the bias is rounded before the activation.

    Args:
        input: tensor (..., in_features); float64, float32, float16, bfloat16. Also: x.
        weight: tensor (panels, groups, 32, interleave); int8, uint8.
        bias: tensor (out_features,); the dtype of input, optional.
        scales: tensor (panels, scale_groups, 32); float32.
        out_features: rows of the weight before it was packed.
        interleave: numbers side by side: 1 for int8, 4 bytes for int4.
        group_size: input features that share a scale; 0 for all of them.
        activation: applied to the sum: none, relu, gelu, gelu_tanh, silu.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (..., out_features).

    Operations: mlp.linear.quantized. See which kernel runs with lz.which and lz.explain.
    """

def fused_mlp(
    input: _Array,
    up_weight: _Array,
    down_weight: _Array,
    gate_weight: _Array | None = None,
    activation: str = "silu",
    *,
    out: _Array | None = None,
) -> _Array:
    """Feed-forward block: up-projection, activation (gated when gate_weight is given), down-projection.

    h = act(input . gate_weight^T) * (input . up_weight^T), or act(input . up_weight^T) without a gate; out = h .
    down_weight^T; gelu is the exact one

    Args:
        input: tensor (..., hidden); float64, float32, float16, bfloat16. Also: x.
        up_weight: tensor (intermediate, hidden); the dtype of input.
        down_weight: tensor (hidden, intermediate); the dtype of input.
        gate_weight: tensor (intermediate, hidden); the dtype of input, optional.
        activation: the activation: silu, gelu, relu.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor (..., hidden).

    Operations: mlp.fused. See which kernel runs with lz.which and lz.explain.
    """

def silu_mul(gate: _Array, up: _Array, *, out: _Array | None = None) -> _Array:
    """Silu of the gate times the other half.

    out = gate / (1 + exp(-gate)) * up

    Edge cases:
        - Case: a number of gate is infinite.
          Result: the limit: infinity of infinity, 0 of minus infinity.
          Exception: kernels but the reference may give NaN.

    Args:
        gate: tensor (..., width); float64, float32, float16, bfloat16. Also: a.
        up: tensor (..., width); the dtype of gate. Also: b.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like gate.

    Operations: activation.silu_mul. See which kernel runs with lz.which and lz.explain.
    """

def gelu(input: _Array, approximate: str = "none", *, out: _Array | None = None) -> _Array:
    """Gaussian error linear unit.

    out = x/2 (1 + erf(x/sqrt(2))), or with approximate = tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    Edge cases:
        - Case: a number is infinite.
          Result: the limit: infinity of infinity, 0 of minus infinity.
          Exception: kernels but the reference may give NaN.

    Args:
        input: tensor (..., width); float64, float32, float16, bfloat16. Also: x.
        approximate: which form: none, tanh.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like input.

    Operations: activation.gelu. See which kernel runs with lz.which and lz.explain.
    """

def softmax(input: _Array, *, out: _Array | None = None) -> _Array:
    """Softmax over the last dimension.

    out = exp(x - max(x)) / sum(exp(x - max(x))), with the maximum and the sum over the last dimension

    Edge cases:
        - Case: a row is nothing but minus infinity, or has plus infinity in it.
          Result: NaN in the whole row, as torch does.
        - Case: a result is below the smallest normal number of its dtype.
          Result: that number, or 0.

    Args:
        input: tensor (..., width); float64, float32, float16, bfloat16. Also: x.
        out: tensor the result is written to; a new one when not given.

    Returns:
        output: tensor shaped like input.

    Operations: activation.softmax. See which kernel runs with lz.which and lz.explain.
    """

def sample_topk(
    logits: _Array,
    k: int,
    *,
    uniform: _Array | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    out: _Array | None = None,
) -> _Array:
    """Draws one of the k most likely tokens of each row.

    keep the k largest logits (the lower index first among equals), softmax over them, and take the first kept token, by
    descending logit, at which the cumulative probability exceeds the row's uniform number. A NaN among the logits gives
    id -1.

    Edge cases:
        - Case: a uniform number is NaN or outside [0, 1).
          Result: an error on the CPU (BAD_DATA).
          Exception: other devices are not waited for: a number below 0 counts as 0, and 1 or more or NaN draws the last
              token that can be drawn.

    Args:
        logits: tensor (..., vocab); float64, float32, float16, bfloat16.
        k: how many tokens to keep; more than there are keeps all.
        uniform: tensor (...,); float64, float32, optional.
        seed: seed of the draws.
        generator: generator the seed is drawn from when none is given.
        out: tensor the result is written to; a new one when not given.

    Returns:
        ids: tensor (...,).

    Operations: sampling.topk. See which kernel runs with lz.which and lz.explain.
    """

def sample_topp(
    logits: _Array,
    p: float,
    *,
    uniform: _Array | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    out: _Array | None = None,
) -> _Array:
    """Draws from the smallest set of tokens whose probability reaches p.

    softmax, sort descending (the lower index first among equals), keep tokens until their cumulative probability
    reaches p (the one that reaches it included, always at least one), renormalize, and take the first at which the
    cumulative probability exceeds the row's uniform number. A NaN among the logits gives id -1.

    Edge cases:
        - Case: a uniform number is NaN or outside [0, 1).
          Result: an error on the CPU (BAD_DATA).
          Exception: other devices are not waited for: a number below 0 counts as 0, and 1 or more or NaN draws the last
              token that can be drawn.

    Args:
        logits: tensor (..., vocab); float64, float32, float16, bfloat16.
        p: probability to keep, in (0, 1].
        uniform: tensor (...,); float64, float32, optional.
        seed: seed of the draws.
        generator: generator the seed is drawn from when none is given.
        out: tensor the result is written to; a new one when not given.

    Returns:
        ids: tensor (...,).

    Operations: sampling.topp. See which kernel runs with lz.which and lz.explain.
    """

def speculative_verify(
    draft_ids: _Array,
    draft_probs: _Array,
    target_probs: _Array,
    *,
    uniform: _Array | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
) -> tuple[_Array, _Array]:
    """Accepts or rejects drafted tokens so that the result is distributed as the target model's.

    draft token t at step i is accepted when uniform[i] * draft[i, t] < target[i, t]; at the first rejection a token is
    drawn from max(target - draft, 0) normalized (from target itself where that is all zero), after the last acceptance
    one from the extra target row, in both cases as the first token, in vocabulary order, whose cumulative probability
    exceeds uniform[draft]. ids holds the accepted tokens, the drawn one, then -1; accepted counts the accepted ones.

    Edge cases:
        - Case: a uniform number is NaN or outside [0, 1).
          Result: an error on the CPU (BAD_DATA).
          Exception: other devices are not waited for: a number below 0 counts as 0, and 1 or more or NaN draws the last
              token that can be drawn.

    Args:
        draft_ids: tensor (batch, draft); int64, int32.
        draft_probs: tensor (batch, draft, vocab); float64, float32, float16, bfloat16.
        target_probs: tensor (batch, draft + 1, vocab); the dtype of draft_probs.
        uniform: tensor (batch, draft + 1); float64, float32, optional.
        seed: seed of the draws.
        generator: generator the seed is drawn from when none is given.

    Returns:
        ids: tensor (batch, draft + 1).
        accepted: tensor (batch,).

    Operations: sampling.speculative. See which kernel runs with lz.which and lz.explain.
    """

@overload
def quantize(
    input: _Array,
    dtype: str,
    scale: _Array,
    *,
    granularity: str = "per_tensor",
    group_size: int | None = None,
    zero_point: bool = False,
) -> _Array:
    """Rounds to a low-precision format with scales.

    a scale covers the granularity's elements: max|x| / largest value of the format, as float32 unless given (mxfp4:
    rounded down to a power of two of the block's exponent, 2^(floor(log2 max|x|) - 2); nvfp4: rounded to E4M3). values
    = round(x / scale), half to even, saturating; a scale of 0 gives 0. With zero_point, integers cover the range of the
    data and zero: with min = min(x, 0) and max = max(x, 0), scale = (max - min) / (2^bits - 1), zero_point =
    round(lowest - min / scale), values = round(x / scale) + zero_point. A scale of one dimension covers whole rows.

    Edge cases:
        - Case: an infinity is among the numbers a computed scale covers.
          Result: an infinite scale (of int8, int4 and float8): finite numbers are 0 units, infinities 0 of an integer
              and NaN of a float8. The zero point is the format's lowest number where the infinity is positive, and 0
              where there is a negative one.

    Args:
        input: tensor (..., cols); float64, float32, float16, bfloat16.
        dtype: the format to round to: int8, int4, fp8_e4m3, fp8_e5m2, mxfp4, nvfp4.
        scale: tensor (scale_rows, scale_cols) or (scale_rows,) or (1,); float32, optional.
        granularity: what one scale covers: everything, a row, or group_size elements of a row: per_tensor, per_channel,
            blockwise.
        group_size: elements per scale when blockwise; the format's own when not given (mxfp4 32, nvfp4 16), else 32.
        zero_point: offset integers so that they cover the range of the data.

    Returns:
        values: tensor shaped like input.
        scales: tensor (scale_rows, scale_cols).
        zero_points: tensor (scale_rows, scale_cols).

    Operations: quantize. See which kernel runs with lz.which and lz.explain.
    """

@overload
def quantize(
    input: _Array,
    dtype: str,
    scale: None = None,
    *,
    granularity: str = "per_tensor",
    group_size: int | None = None,
    zero_point: bool = False,
) -> Quantized: ...
def dequantize(
    values: _Array,
    scales: _Array,
    zero_points: _Array | None = None,
    *,
    dtype: str = "float32",
    granularity: str = "per_tensor",
    group_size: int | None = None,
    format: str | None = None,
) -> _Array:
    """Back to floating point.

    out = (values - zero_point) * scale, with the scale and zero point that cover the element; quantize gives zero
    points of 0 for formats that have none, so that dequantize takes all it returns

    Args:
        values: tensor (..., cols); float8_e4m3fn, float8_e5m2, mxfp4, nvfp4, int8, int4. Also: input.
        scales: tensor (scale_rows, scale_cols) or (scale_rows,) or (1,); float32. Also: scale.
        zero_points: tensor (scale_rows, scale_cols) or (scale_rows,) or (1,); int32, optional.
        dtype: the dtype of the result: float32, float16, bfloat16, float64.
        granularity: what one scale covers: everything, a row, or group_size elements of a row: per_tensor, per_channel,
            blockwise.
        group_size: elements per scale when blockwise; the format's own when not given (mxfp4 32, nvfp4 16), else 32.
        format: the format of packed 4-bit values (int4, mxfp4, nvfp4).

    Returns:
        output: tensor shaped like values.

    Operations: dequantize. See which kernel runs with lz.which and lz.explain.
    """

def kv_append(
    key: _Array,
    value: _Array,
    key_cache: _Array,
    value_cache: _Array,
    slot_mapping: _Array,
    *,
    layout: str | None = None,
) -> None:
    """Writes new keys and values into their slots.

    slot s = slot_mapping[t] is slot s % block_size of page s / block_size; negative slots are skipped (padding); later
    tokens win. Values are rounded to the cache's dtype. A slot beyond the cache is an error and nothing is written.

    Args:
        key: tensor (tokens, kv_heads, head_dim); float64, float32, float16, bfloat16.
        value: tensor (tokens, kv_heads, head_dim); the dtype of key.
        key_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        value_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; the dtype of key_cache.
        slot_mapping: tensor (tokens,); int64, int32.
        layout: the order of the dimensions; NHD when not given, or what default_cache_layout says.

    Returns:
        None; key_cache and value_cache are updated in place.

    Operations: kv_cache.append. See which kernel runs with lz.which and lz.explain.
    """

def kv_compact(key_cache: _Array, value_cache: _Array, moves: _Array, *, layout: str | None = None) -> None:
    """Moves pages, so that freed ones gather at the end.

    page moves[i, 1] becomes what page moves[i, 0] held before the call; sources are read before anything is written; of
    two moves to one page the later wins. A page beyond the cache is an error and nothing is written.

    Args:
        key_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        value_cache: tensor (num_blocks, block_size, kv_heads, head_dim) as NHD or (num_blocks, kv_heads, block_size,
            head_dim) as HND; the dtype of key_cache.
        moves: tensor (moves, 2); int64, int32.
        layout: the order of the dimensions; NHD when not given, or what default_cache_layout says.

    Returns:
        None; key_cache and value_cache are updated in place.

    Operations: kv_cache.compact. See which kernel runs with lz.which and lz.explain.
    """

def after_fork() -> None: ...
def after_fork_in_child() -> None: ...
def allocations() -> int | None: ...
def backends() -> str: ...
def before_fork() -> None: ...
def busy(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
def call_inputs(call: str, device: int) -> dict[str, Any]: ...
def calls_made() -> int: ...
def checkpoint() -> Checkpoint: ...
def cli(args: Sequence[str]) -> int: ...
def configure(settings: dict[str, Any]) -> None: ...
def default_layouts(here: bool) -> tuple[str, str]: ...
def device_name(device: int) -> str: ...
def device_number(name: str) -> int: ...
def devices() -> str: ...
def disable(name: str, why: str) -> None: ...
def document(text: str, version: str | None = None) -> str: ...
def end() -> None: ...
def exchange_capture_mode(mode: int) -> int | None: ...
def explain(op: str, *args: Any, **kwargs: Any) -> tuple[str, str]: ...
def explain_call(call: str, device: int) -> tuple[str, str]: ...
def explain_to_compile(op: str, captured: bool, *args: Any, **kwargs: Any) -> str: ...
def forget_failures() -> None: ...
def functions() -> list[dict[str, Any]]: ...
def graph_captured(kernel: str, call: str, device: int, doubt: str | None = None) -> None: ...
def graph_hold(call: str, device: int) -> str: ...
def graph_release() -> None: ...
def graph_wanted(call: str, device: int) -> str | None: ...
def health() -> tuple[str, str, bool]: ...
def hold_changes() -> None: ...
def inner(name: str, *args: Any, **kwargs: Any) -> Any: ...
def jit_begin(kernel: str, call: str, device: int) -> int: ...
def jit_done(id: int, compile_ms: float, caches: Sequence[str | PathLike[str]]) -> None: ...
def jit_failed(id: int, error: str) -> None: ...
def jit_forked() -> int: ...
def jit_next() -> tuple[int, str, str, int] | None: ...
def jit_wanted(call: str, device: int, capturing: bool = False) -> str | None: ...
def learn() -> int: ...
def list_kernels(op: str | None = None) -> str: ...
def load_backend(
    name: str,
    document: str,
    versions: dict[str, str],
    adapters: Sequence[_Adapter],
    unavailable: tuple[str, str] | None = None,
    trust: str = "unproven",
    lacks: Sequence[str] = ...,
    importer: Callable[[], object] | None = None,
) -> None: ...
def load_config(path: str | PathLike[str]) -> None: ...
def load_sources() -> None: ...
def load_table(text: str, origin: str) -> str: ...
def load_warm() -> int: ...
def lock(operation: str, kernel: str, optional: bool = False) -> None: ...
def lockfile(calls: Sequence[str], device: int) -> str: ...
def manifest() -> str: ...
def may_explain() -> None: ...
def measure(
    request: str,
    budget_s: float,
    samples: int,
    force: bool,
    seed: int,
    regret: bool,
    tell: Callable[[str], bool] | None = None,
    stop: Callable[[], bool] | None = None,
) -> str: ...
def overlay(settings: dict[str, Any], plans: Sequence[Plan]) -> Overlay: ...
def packed_weights(cls: type[PackedWeight]) -> None: ...
def perfdb_warnings() -> list[str]: ...
def pin_warnings() -> list[str]: ...
def plan_call(call: str, device: int) -> str: ...
def read_manifest(path: PathLike[str] | None = None, model_hash: str | None = None) -> tuple[str, int]: ...
def readiness() -> tuple[str, str, bool]: ...
def rearm(name: str) -> bool: ...
def recording() -> Plan: ...
def refresh_memory() -> None: ...
def register(document: str, kernel: _Adapter, trust: str = "unproven") -> None: ...
def reload() -> None: ...
def replay(text: str, origin: str) -> str: ...
def requested_calls(request: str) -> list[str]: ...
def reset() -> None: ...
def restore(checkpoint: Checkpoint) -> None: ...
def run_kernel(kernel_id: str, *args: Any, **kwargs: Any) -> Any: ...
def save_manifest(path: PathLike[str] | None = None, model_hash: str | None = None) -> str: ...
def schema(operation: str) -> dict[str, Any]: ...
def set_launch_limits(
    device: int, max_grid: tuple[int, int, int] | None, max_threads_per_block: int | None
) -> None: ...
def settings() -> str: ...
def settle_changes() -> None: ...
def settle_names() -> None: ...
def solve(model_id: str, calls: Sequence[str], device: int, buckets: dict[str, list[int]]) -> tuple[str, str]: ...
def status() -> dict[str, Any]: ...
def text_operation(kernel_id: str) -> str | None: ...
def time_host_by_events(yes: bool) -> None: ...
def tokenizer_settings() -> tuple[bool, int]: ...
def unlock(operation: str) -> None: ...
def unpin() -> None: ...
def unregister(kernel_id: str) -> None: ...
def use_context_variable(variable: ContextVar[int]) -> None: ...
def validate(kernel_id: str, *args: Any, **kwargs: Any) -> list[Reason]: ...
def which(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
def write_file(path: PathLike[str], text: str) -> None: ...
