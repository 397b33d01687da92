"""Patterns and special tokens of encodings whose ranks come in a file, as tiktoken 0.14.0 has them."""

_END = "<|endoftext|>"
_R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s"""
)
_ENDING = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
_O200K = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    rf"""{_ENDING}|"""
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
    rf"""{_ENDING}|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}

#: By name: the pattern, and the special tokens.
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": (_R50K, {_END: 50256}),
    "p50k_base": (_R50K, {_END: 50256}),
    "cl100k_base": (_CL100K, {_END: 100257, **_FIM, "<|endofprompt|>": 100276}),
    "o200k_base": (_O200K, {_END: 199999, "<|endofprompt|>": 200018}),
}
