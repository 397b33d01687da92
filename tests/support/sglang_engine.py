"""A small model in SGLang's engine: `python sglang_engine.py FOLDER MODEL BACKEND`.

FOLDER gets the model's files. Prints one line of JSON: the answered tokens, how many prompt tokens were found in the prefix
cache, and the attention backend. SGLang's scheduler and model are in a process that its engine starts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm_engine import saved


def main() -> None:
    """Two rounds of requests: those of vllm_engine.py."""
    from sglang.srt.entrypoints.engine import Engine

    # 48 tokens in a step: longer prompts come in pieces, together with the next tokens of other requests.
    engine = Engine(
        model_path=saved(Path(sys.argv[1]), sys.argv[2]),
        attention_backend=sys.argv[3],
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        sampling_backend="pytorch",
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        context_length=256,
        chunked_prefill_size=48,
        max_running_requests=8,
        random_seed=0,
    )
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[int]:
        return torch.randint(0, 512, (count,), generator=generator).tolist()  # type: ignore[no-any-return]

    common = drawn(70)
    greedy = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
    tokens, cached = [], []
    for lengths in ((3, 17, 1, 30), (5, 40)):
        prompts = [common + drawn(length) for length in lengths] + [drawn(7)]
        for one in engine.generate(input_ids=prompts, sampling_params=greedy):
            tokens.append(one["output_ids"])
            cached.append(one["meta_info"]["cached_tokens"])
    print(json.dumps({"tokens": tokens, "cached": cached, "backend": engine.server_args.attention_backend}))
    engine.shutdown()


if __name__ == "__main__":
    main()
