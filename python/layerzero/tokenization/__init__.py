"""Text to tokens and back: ``lz.tokenize``, ``lz.detokenize``, ``lz.register_tokenizer``.

A tokenizer belongs to one library, which defines its ids. Others may serve its calls only where it was shown that they
give the same ids; of those the engine chooses, as for every operation.
"""

from layerzero.tokenization.api import detokenize, tokenize
from layerzero.tokenization.resolving import register_tokenizer

__all__ = ["detokenize", "register_tokenizer", "tokenize"]
