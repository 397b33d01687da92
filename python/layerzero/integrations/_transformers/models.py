"""Models of transformers as modules without memory: built on the meta device from a configuration, and called in phases.

Nothing is downloaded and no weight is allocated. Attention and experts go through functions registered with transformers
under a name of ours, so that windows, caps and the number of rows of an expert are seen and nothing depends on values.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from layerzero.errors import ConfigurationError
from layerzero.inspection import TensorSpec

Phase = Literal["prefill", "decode"]

#: What transformers knows our functions as.
NAME = "layerzero_calls"
_HINT = (
    "give the path of a config.json, a transformers config, or a torch.nn.Module with inputs: lz.tune(module, inputs)"
)


def refused(text: str, hint: str = _HINT, code: str = "BAD_MODEL") -> ConfigurationError:
    """A model that cannot be built."""
    return ConfigurationError(text, code=code, hint=hint)


@cache
def published() -> dict[str, dict[str, Any]]:
    """Configurations that makers of models have published, by the names used here."""
    text = (Path(__file__).parents[2] / "published_configs.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, Any]] = json.loads(text)
    return configs


@dataclass
class Built:
    """A model without memory, and what of the configuration is not in it."""

    model: Any
    name: str
    left_out: list[str] = field(default_factory=list)


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise refused(
            f"transformers cannot be imported: {error}",
            "install it (pip install transformers), or give a torch.nn.Module with inputs: lz.tune(module, inputs)",
            "NO_TRANSFORMERS",
        ) from error
    return transformers


def named(model: Any) -> bool:
    """Whether this says which model is meant, and is none itself: a name, a path, a configuration."""
    if isinstance(model, str | os.PathLike | Mapping):
        return True
    return not callable(model) and hasattr(model, "to_dict")


def written(model: Any) -> Mapping[str, Any] | Any:
    """The configuration that a name, a path, a text or an object says."""
    if isinstance(model, Mapping):
        return model
    if isinstance(model, os.PathLike):
        return _read(Path(model))
    if not isinstance(model, str):
        return model
    if model.lstrip().startswith("{"):
        return _parsed(model, "the text given as model")
    if (known := published().get(model.lower())) is not None:
        return {**known, "_name_or_path": model.lower()}
    path = Path(model)
    if path.exists() or path.suffix == ".json":
        return _read(path)
    if (cached := _cached(model)) is not None:
        return {**_read(cached), "_name_or_path": model}
    names = ", ".join(published())
    raise refused(
        f"unknown model '{model}': it is no path, and its config.json is not in the local Hugging Face cache",
        f"give the path of a config.json, a name whose config.json was downloaded, or one of {names}",
    )


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refused(f"'{path}' cannot be read: {error}") from error
    return _parsed(text, f"'{path}'")


def _parsed(text: str, what: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise refused(f"{what} is no JSON: {error}", "give the config.json of a transformers model") from error
    if not isinstance(data, dict):
        raise refused(f"{what} is no JSON object", "give the config.json of a transformers model")
    return data


def _cached(name: str) -> Path | None:
    """The config.json of a name in the local Hugging Face cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def config_of(model: Any) -> Any:
    """A transformers configuration of its own, made from what was given."""
    data = written(model)
    transformers = _library()
    if not isinstance(data, Mapping):
        if not hasattr(data, "model_type"):
            raise refused(f"the model is a {type(model).__name__}")
        return copy.deepcopy(data)
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise refused(f"the configuration's 'model_type' is {kind!r}", 'write it as transformers does, e.g. "llama"')
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise refused(
            f"transformers {transformers.__version__} has no model_type '{kind}'",
            "install a newer transformers, or build the model yourself and give it with inputs: lz.tune(module, inputs)",
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(data))
    # Whatever its checks raise, it is what is wrong with the file.
    except Exception as error:
        raise refused(f"the configuration of '{kind}' is refused by transformers: {error}", "correct it") from error


def name_of(model: Any) -> str:
    """What to call the model of a configuration."""
    data = written(model)
    said = data.get if isinstance(data, Mapping) else lambda key: getattr(data, key, None)
    return str(said("_name_or_path") or said("model_type") or type(model).__name__)


def build(model: Any, dtype: Any) -> Built:
    """The model of a configuration, on the meta device."""
    import torch

    config = config_of(model)
    name = getattr(config, "_name_or_path", "") or config.model_type
    left_out: list[str] = []
    text = config.get_text_config()
    if text is not config:
        others = [key for key in config.sub_configs if getattr(config, key, None) is not text]
        left_out.append(f"only the text model is traced; left out: {', '.join(others) or 'the rest'}")
        config = copy.deepcopy(text)
    if getattr(config, "quantization_config", None) is not None:
        left_out.append(f"its quantization_config: the calls are those of {str(dtype).removeprefix('torch.')} weights")
        del config.quantization_config
    for key in ("rope_parameters", "rope_scaling"):
        scaling = getattr(config, key, None)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in ("longrope", "dynamic"):
            # These choose their frequencies by the length of the input; shapes are the same.
            setattr(config, key, {"rope_type": "default", "rope_theta": scaling.get("rope_theta", 10_000.0)})
    _register()
    made = _class_of(config)
    try:
        with torch.device("meta"):
            built = made._from_config(config, dtype=dtype, attn_implementation=_attention_of(made))
    # Whatever a constructor raises, it is what is wrong with the configuration.
    except Exception as error:
        raise refused(
            f"{made.__name__} cannot be built from this configuration: {type(error).__name__}: {error}"
        ) from error
    for module in built.modules():
        if isinstance(getattr(module, "config", None), type(config)):
            module.config._experts_implementation = NAME
    return Built(built.eval(), name, left_out)


def with_weights(model: Any, layers: int | None = None) -> Any:
    """The model of a configuration on the CPU, in float32, with weights of no meaning; with so many layers."""
    import torch

    config = config_of(model).get_text_config()
    if layers is not None:
        config.num_hidden_layers = layers
    made = _class_of(config)
    try:
        return made._from_config(config, dtype=torch.float32).eval()
    # Whatever a constructor raises, it is what is wrong with the configuration.
    except Exception as error:
        raise refused(
            f"{made.__name__} cannot be built from this configuration: {type(error).__name__}: {error}"
        ) from error


def _class_of(config: Any) -> Any:
    """The class that runs a configuration: the one it names, else the one that generates, else the bare model."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in getattr(config, "architectures", None) or ():
        made = getattr(transformers, name, None)
        if made is not None and isinstance(config, made.config_class):
            return made
    kind = type(config)
    if getattr(config, "is_encoder_decoder", False):
        mappings = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
    elif kind in auto.MODEL_FOR_MASKED_LM_MAPPING:
        mappings = [auto.MODEL_FOR_MASKED_LM_MAPPING]
    else:
        mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    for mapping in (*mappings, auto.MODEL_MAPPING):
        if kind in mapping:
            found = mapping[kind]
            return found[0] if isinstance(found, tuple) else found
    raise refused(
        f"transformers has no model for '{config.model_type}'",
        "name its class in the configuration's 'architectures', or give a torch.nn.Module with inputs",
    )


def _attention_of(made: Any) -> str:
    """How attention is called: through our function where the model lets it be chosen."""
    if "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[made.__module__]):
        return NAME
    return "sdpa" if getattr(made, "_supports_sdpa", False) else "eager"


@cache
def _register() -> None:
    """Makes our functions known to transformers. Models that do not name them are not affected."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    # What a mask says is in the arguments of the attention function.
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention as transformers calls it, by our function."""
    import layerzero as lz
    from layerzero.tracing import recorder_here

    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    if s_aux is not None:
        recorder = recorder_here()
        result = query.new_empty(batch, queries, heads, value.shape[3])
        if recorder is not None:
            flops = 2 * batch * heads * queries * keys * (dim + value.shape[3])
            moved = sum(tensor.nbytes for tensor in (query, key, value, result))
            recorder.not_ours("attention", "attention with a sink is none of ours", flops, moved)
        return result, None
    mask = attention_mask
    if position_bias is not None:
        mask, causal = position_bias.expand(-1, heads, queries, keys), False
    given: dict[str, Any] = {"causal": causal and mask is None}
    if scaling is not None and abs(scaling * dim**0.5 - 1) > 1e-9:
        given["scale"] = scaling
    if softcap is not None:
        given["softcap"] = softcap
    if sliding_window is not None and keys > sliding_window and given["causal"]:
        given["window"] = sliding_window - 1
    out = lz.attention(query, key, value, attn_mask=mask, layout="BHSD", **given)
    return out.transpose(1, 2), None


def _experts(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Experts as transformers calls them: each gets the same number of rows."""
    import torch.nn.functional as F

    from layerzero.tracing import recorder_here

    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    chosen = max(top_k_index.numel(), 1)
    busy = min(chosen, up.shape[0])
    rows = hidden_states.new_empty((chosen - 1) // busy + 1, hidden_states.shape[-1])

    def weights(of: Any, name: str) -> tuple[Any, Any]:
        weight = of[0].transpose(0, 1) if module.is_transposed else of[0]
        return weight, getattr(module, name + "_bias")[0] if module.has_bias else None

    recorder = recorder_here()
    before = 1 if recorder is None else recorder.times
    try:
        if recorder is not None:
            recorder.times = before * busy
        weight, bias = weights(up, "gate_up_proj" if module.has_gate else "up_proj")
        middle = F.linear(rows, weight, bias)
        if recorder is not None and module.has_gate:
            # The gate and the projection up, apart.
            half = weight.shape[0] // 2
            one = {"input": rows, "weight": weight[:half], "bias": None if bias is None else bias[:half]}
            recorder.alternative("linear", one, 2)
        middle = module._apply_gate(middle) if module.has_gate else module.act_fn(middle)
        F.linear(middle, *weights(down, "down_proj"))
    finally:
        if recorder is not None:
            recorder.times = before
    return hidden_states.new_empty(hidden_states.shape)


def positions_of(built: Built) -> int | None:
    """How many positions a model has learned; nothing where it has no table of them."""
    from torch import nn

    config = built.model.config
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        most = getattr(config, key, None)
        if not isinstance(most, int):
            continue
        tables = (
            m
            for name, m in built.model.named_modules()
            if isinstance(m, nn.Embedding) and "pos" in name or "wpe" in name
        )
        # Some keep a few rows to themselves.
        if any(most <= table.num_embeddings <= most + 8 for table in tables):
            return most
    return None


def generates(built: Built) -> bool:
    """Whether it makes one token after another."""
    return bool(built.model.can_generate())


def fixed_input(built: Built) -> bool:
    """Whether the size of its input is the configuration's: a picture, a spectrogram."""
    return bool(getattr(built.model, "main_input_name", "input_ids") != "input_ids")


def inputs(built: Built, batch: int, length: int) -> dict[str, Any]:
    """What it is called with to read that many tokens."""
    model, config = built.model, built.model.config
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids":
        return {name: TensorSpec((batch, length), "int64")}
    dtype = str(model.dtype).removeprefix("torch.")
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {name: TensorSpec((batch, getattr(config, "num_channels", 3), height, width), dtype)}
    if name == "input_features" and hasattr(config, "max_source_positions"):
        # The first convolutions halve the number of frames.
        return {name: TensorSpec((batch, config.num_mel_bins, 2 * config.max_source_positions), dtype)}
    raise refused(
        f"nothing says the size of '{name}', which {type(model).__name__} is called with",
        f"give the module and its inputs: lz.tune(module, {name}=…)",
    )


def run_of(built: Built, phase: Phase, context: int) -> Any:
    """Calls a model in a phase: see :data:`layerzero.tracing.Run`."""
    import inspect

    import torch

    accepted = set(inspect.signature(built.model.forward).parameters)
    last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    both = bool(getattr(built.model.config, "is_encoder_decoder", False))
    cached = {"use_cache": True} if "use_cache" in accepted else {}
    plain = {"use_cache": False} if "use_cache" in accepted else {}

    def ids(batch: int, length: int) -> Any:
        return torch.zeros(batch, length, dtype=torch.int64)

    def run(model: Any, recorder: Any, _: tuple[Any, ...], given: dict[str, Any]) -> None:
        recorder.stacks = True
        batch = next(iter(given.values())).shape[0]
        if phase == "prefill":
            started = {"decoder_input_ids": ids(batch, 1)} if both else {}
            model(**given, **started, **plain, **last)
            return
        if both:
            out = model(**given, decoder_input_ids=ids(batch, max(context - 1, 1)), **cached)
            recorder.forget()
            rest = {"encoder_outputs": (out.encoder_last_hidden_state,), "decoder_input_ids": ids(batch, 1)}
            model(**rest, past_key_values=out.past_key_values, **cached)
            return
        past = {}
        if context > 1:
            out = model(input_ids=ids(batch, context - 1), **_empty_cache(accepted), **cached, **last)
            past = {
                name: out[name] for name in ("past_key_values", "cache_params", "state") if out.get(name) is not None
            }
            recorder.forget()
        model(input_ids=ids(batch, 1), **past, **cached, **last)

    return run


def _empty_cache(accepted: set[str]) -> dict[str, Any]:
    """A cache that keeps every key: a window is an argument of attention."""
    if "past_key_values" not in accepted:
        return {}
    from transformers import DynamicCache

    return {"past_key_values": DynamicCache()}


def besides(built: Built, phase: Phase, batch: int, context: int, dtype: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Calls that serving makes and the module does not: latent attention over pages, and sampling; each with how often."""
    if phase == "decode":
        latent = [m for m in built.model.modules() if hasattr(m, "kv_lora_rank") and hasattr(m, "qk_rope_head_dim")]
        if latent and getattr(latent[0], "num_heads", None):
            yield _absorbed(latent[0], batch, context, dtype), len(latent)
    vocab = getattr(built.model.config, "vocab_size", None)
    if generates(built) and vocab:
        logits = {"logits": {"dtype": "float32", "shape": [batch, vocab]}}
        yield {"op": "sample_topk", "tensors": logits, "params": {"k": 50}}, 1
        yield {"op": "sample_topp", "tensors": logits, "params": {"p": 0.9}}, 1


def _absorbed(module: Any, batch: int, context: int, dtype: str) -> dict[str, Any]:
    """Latent attention with its projections absorbed, over a paged cache."""
    page = 64
    pages = (context - 1) // page + 1
    heads, rank, rope = module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim
    shapes = {
        "q_nope": (dtype, [batch, heads, rank]),
        "q_pe": (dtype, [batch, heads, rope]),
        "ckv_cache": (dtype, [batch * pages, page, rank]),
        "kpe_cache": (dtype, [batch * pages, page, rope]),
        "block_tables": ("int32", [batch, pages]),
        "context_lens": ("int32", [batch]),
    }
    tensors = {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in sorted(shapes.items())}
    scale = getattr(module, "scaling", None) or (module.qk_nope_head_dim + rope) ** -0.5
    return {"op": "attention.mla", "tensors": tensors, "params": {"scale": scale}}
