"""A small model in vLLM, in a process of its own: `python vllm_engine.py FOLDER MODEL JSON`.

FOLDER gets the model's files. JSON has arguments of `vllm.LLM`. Prints one line of JSON: the answered tokens, how many prompt
tokens were found in the prefix cache, and which operations LayerZero served.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# vLLM compiles norms and samplers of an eager engine too, with a C++ compiler: minutes, and nothing of it is compared.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def saved(folder: Path, name: str) -> str:
    """A model with random weights, as files."""
    import transformers

    more: dict[str, Any] = {
        "Llama": {},
        "Mistral": {"sliding_window": 24},
        "Gemma2": {"sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    }[name]
    where = folder / name
    if not where.exists():
        config = getattr(transformers, f"{name}Config")(**SIZES, **more)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float()
        for weight in model.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.15)
        # Small, so that the answer depends on more than the last token.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
        model.save_pretrained(where)
    return str(where)


def main() -> None:
    """Two rounds of requests."""
    folder, name, given = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    model = saved(folder, name)
    import layerzero as lz
    from vllm import LLM, SamplingParams

    # 48 tokens in a step: longer prompts come in pieces, together with the next tokens of other requests.
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 32}
    plain = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(model, **{**sizes, **plain, "enable_prefix_caching": True, "enable_chunked_prefill": True, **given})
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[int]:
        return torch.randint(0, 512, (count,), generator=generator).tolist()  # type: ignore[no-any-return]

    common = drawn(70)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, detokenize=False, ignore_eos=True)
    tokens, cached = [], []
    for lengths in ((3, 17, 1, 30), (5, 40)):
        prompts = [common + drawn(length) for length in lengths] + [drawn(7)]
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        tokens += [list(one.outputs[0].token_ids) for one in done]
        cached += [one.num_cached_tokens for one in done]
    ops = sorted({one.call["op"] for one in lz.manifest()})
    print(json.dumps({"tokens": tokens, "cached": cached, "ops": ops}))


if __name__ == "__main__":
    main()
