"""An engine of vLLM in a process of its own, which `vllm_serving.py` starts: it builds the engine, then reads requests from standard
input, a line of JSON each, and writes an answer for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: How engines run a step: `cudagraph_mode` of vLLM. NONE is eager.
MODES = {"eager": "NONE", "pieces": "PIECEWISE", "graphs": "FULL_AND_PIECEWISE"}
OURS, OWN = "LayerZero", "vLLM"


def save(folder: Path, *, layers: int, tiny: bool) -> None:
    """Writes the models: `small`, with random weights, and `large`, only its sizes."""
    import torch
    import transformers

    none = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **none)).float()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.15)
    # Small, so that the answer depends on more than the last token.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
    model.save_pretrained(folder / "small")
    large: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    large |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500_000.0}
    config = transformers.LlamaConfig(**({**small, "max_position_embeddings": 8192} if tiny else large), **none)
    config.num_hidden_layers, config.max_position_embeddings = layers, 8192
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "large")


class Engine:
    """vLLM in this process."""

    def __init__(self, given: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": True, "seed": 0}
        arguments |= {"enable_prefix_caching": True, "enable_chunked_prefill": True, **given["arguments"]}
        if given["by"] == OURS:
            from layerzero.integrations import vllm as plugin

            plugin.register()
            arguments["attention_backend"] = plugin.name()
        if given["mode"] == "eager":
            arguments["enforce_eager"] = True
        else:
            arguments["compilation_config"] = {"cudagraph_mode": MODES[given["mode"]]}
            arguments["compilation_config"]["cudagraph_capture_sizes"] = given["sizes"]
        if current_platform.is_cpu():
            arguments.pop("kv_cache_memory_bytes", None)
        self.llm = LLM(**arguments)
        self.vocab = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def _generate(self, prompts: list[list[int]], answer: int, logprobs: int | None = None) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=answer, detokenize=False, ignore_eos=True, logprobs=logprobs
        )
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)

    def _drawn(self, seed: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(seed)

        def tokens(count: int) -> list[int]:
            drawn: list[int] = torch.randint(0, self.vocab, (count,), generator=generator).tolist()
            return drawn

        return tokens

    def answers(self) -> dict[str, Any]:
        """Two rounds of requests; the second finds the common beginning in the cache."""
        drawn = self._drawn(1)
        common = drawn(70)
        asked, tokens, likely, cached = [], [], [], []
        for lengths in ((3, 17, 1, 30), (5, 40)):
            prompts = [common + drawn(length) for length in lengths] + [drawn(7)]
            asked += prompts
            for one in self._generate(prompts, 16, logprobs=5):
                tokens.append(list(one.outputs[0].token_ids))
                likely.append([{k: v.logprob for k, v in step.items()} for step in one.outputs[0].logprobs])
                cached.append(one.num_cached_tokens)
        return {"prompts": asked, "tokens": tokens, "likely": likely, "cached": cached, **self.backend()}

    def backend(self) -> dict[str, Any]:
        """Which backend the layers have, and which operations LayerZero served."""
        found = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        names = sorted({layer.get_attn_backend().get_name() for layer in found.values()})
        lz = sys.modules.get("layerzero")
        return {"backends": names, "ops": sorted({one.call["op"] for one in lz.manifest()}) if lz else []}

    def timed(self, row: dict[str, int], seed: int) -> dict[str, Any]:
        """Seconds until all requests of a row are answered."""
        drawn = self._drawn(seed)
        prefix = drawn(row["prefix"])
        prompts = [prefix + drawn(row["prompt"]) for _ in range(row["batch"])]
        begun = time.perf_counter()
        done = self._generate(prompts, row["answer"])
        took = time.perf_counter() - begun
        return {"seconds": took, "tokens": sum(len(one.outputs[0].token_ids) for one in done)}

    def profile(self, row: dict[str, int], seed: int) -> dict[str, Any]:
        """What one step of the prompts costs, and one of a token per request."""
        found: dict[str, Any] = {}
        # The prompts of a row come in the first steps; a quarter of the answer later all requests decode.
        decode = max(row["answer"] // 4, 2)
        for name, first, steps in (("prompts", 0, 1), ("decode", decode, max(row["answer"] // 8, 1))):
            wall, kernels = (Window(first, steps, profiled=profiled) for profiled in (False, True))
            for window in (wall, kernels):
                # Other prompts each time: those before are in the prefix cache.
                self._watched(row, seed, window)
                seed += 1
            found[name] = {"wall_ms": 1000.0 * wall.seconds / steps, **kernels.summary()}
        return found

    def _watched(self, row: dict[str, int], seed: int, window: Window) -> None:
        """Answers a row while the window looks at some of the engine's steps."""
        engine, step = self.llm.llm_engine, self.llm.llm_engine.step
        # vLLM calls it by this name.
        engine.step = window.around(step)
        try:
            self.timed(row, seed)
        finally:
            engine.step = step

    def tune(self, seconds: float) -> dict[str, Any]:
        """Measures kernels for the calls of this process: those of decode in graphs, the others eagerly."""
        import layerzero as lz

        begun, failed = time.perf_counter(), []
        entries = [one for one in lz.manifest() if one.device.startswith("cuda")]
        for index, one in enumerate(entries):
            share = (seconds - (time.perf_counter() - begun)) / (len(entries) - index)
            graph = "prefill" not in one.call["op"]
            try:
                lz.tune(calls=[one.call], device=one.device, graph=graph, budget=max(share, 0.2), progress=False)
            except Exception as error:  # noqa: BLE001 - the other calls are tuned all the same
                failed.append(f"{one.call['op']}: {type(error).__name__}: {error}"[:300])
        return {"calls": len(entries), "failed": failed}


class Window:
    """Some steps of an engine, timed or profiled."""

    #: Kernels with the most time that are named.
    MOST = 12

    def __init__(self, first: int, steps: int, *, profiled: bool) -> None:
        self.first, self.steps, self.profiled = first, steps, profiled
        self.seconds = 0.0
        self._done = 0
        self._on_device = False
        self._begun: float | None = None
        self._profiler: Any = None

    def around(self, step: Any) -> Any:
        """The engine's step, with the window opened before the first of its steps and closed after the last."""

        def watched() -> Any:
            if self._done == self.first:
                self._open()
            result = step()
            self._done += 1
            if self._done == self.first + self.steps:
                self._close()
            return result

        return watched

    def _open(self) -> None:
        import torch

        self._on_device = torch.cuda.is_available()
        if self.profiled:
            kinds = torch.profiler.ProfilerActivity
            self._profiler = torch.profiler.profile(activities=[kinds.CUDA if self._on_device else kinds.CPU])
        self._wait()
        if self._profiler is not None:
            self._profiler.__enter__()
        self._begun = time.perf_counter()

    def _close(self) -> None:
        self._wait()
        if self._begun is not None:
            self.seconds = time.perf_counter() - self._begun
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)

    @staticmethod
    def _wait() -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def summary(self) -> dict[str, Any]:
        """Kernels of one step, their milliseconds on the device, and those with the most."""
        if self._profiler is None:
            return {}
        totals = []
        for one in self._profiler.key_averages():
            # Without a GPU they are torch's operators. With one, what the host calls is no kernel.
            on_host = one.device_type.name == "CPU"
            spent = float(one.self_cpu_time_total if on_host else one.self_device_time_total)
            if spent and on_host != self._on_device:
                totals.append((spent / self.steps, one.count / self.steps, one.key))
        totals.sort(reverse=True)
        return {
            "kernels": round(sum(count for _, count, _ in totals), 1),
            "device_ms": sum(spent for spent, _, _ in totals) / 1000.0,
            "top": [
                {"us": round(us, 1), "count": round(n, 2), "name": name[:160]} for us, n, name in totals[: self.MOST]
            ],
        }


def worker(given: dict[str, Any]) -> None:
    """Builds an engine, then does what standard input says, a line of JSON at a time."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What vLLM prints goes to the log.
    os.dup2(2, 1)

    def tell(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    begun = time.perf_counter()
    engine = Engine(given)
    tell({"built_s": round(time.perf_counter() - begun, 1)})
    for line in sys.stdin:
        asked = json.loads(line)
        tell(getattr(engine, asked.pop("do"))(**asked))


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
