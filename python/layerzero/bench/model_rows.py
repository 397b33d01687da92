"""The rows of ``layerzero bench out-of-box``, model by model. To add a kind of row: a function, and its line in ``KINDS``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from layerzero.bench import attention_rows, layer_rows
from layerzero.bench.geometries import Geometry, models
from layerzero.bench.row import Row, Sizes

#: What each model is asked for, in the order of the table; a model that makes no such call gives no row.
KINDS: tuple[Callable[[Geometry, Sizes], Iterable[Row]], ...] = (
    attention_rows.dense,
    attention_rows.window,
    attention_rows.softcap,
    attention_rows.paged,
    attention_rows.latent,
    attention_rows.mask,
    attention_rows.cross,
    layer_rows.rms_norm,
    layer_rows.layer_norm,
    layer_rows.fused_add_rms_norm,
    layer_rows.silu_mul,
    layer_rows.gelu,
    layer_rows.rope,
    layer_rows.linear,
    layer_rows.embedding,
    layer_rows.sample_topk,
    layer_rows.sample_topp,
    layer_rows.quantize,
    layer_rows.dequantize,
    layer_rows.kv_append,
)


def rows(sizes: Sizes, names: Sequence[str] | None = None) -> list[Row]:
    """The rows of the models of these names, or of all. Those with weights beyond ``sizes.largest`` are among them."""
    chosen = [models()[name] for name in names or models()]
    return [row for model in chosen for kind in KINDS for row in kind(model, sizes.within(model.positions))]
