"""Text generation with a compiled causal language model: `CompiledModel.generate`.

| files | what is there |
|---|---|
| `cached_models.py` | a model of transformers as a module whose cache of keys and values is an input |
| `cached_attention.py` | the operator its attention is exported as |
| `decoder.py` | `Decoder`: the module as a graph, and the cache |
| `sampling.py` | how the next token is chosen: greedily, or sampled |
| `loop.py` | prompts and padding; the loop: prefill, then a step for each token |
"""

from layerzero.generating.decoder import Decoder
from layerzero.generating.loop import generate

__all__ = ["Decoder", "generate"]
