"""The libraries LayerZero can call: one folder each, with `capabilities.json` and `adapter.py`."""

BACKENDS: tuple[str, ...] = (
    "torch",
    "torch_cuda",
    "triton",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flash_attn_4_tiles",
    "flash_attn_4_pages",
    "flashinfer",
    "flashinfer_prefill",
    "xformers",
    "liger",
    "apex",
    "quack",
    "cudnn",
    "onednn",
    "zentorch",
    "ipex",
    "tokenizers",
    "tiktoken",
    "sentencepiece",
)
"""Folder names, in the order in which they are looked at."""

UNPROVEN: tuple[str, ...] = (
    "aiter",
    "flash_attn_ck",
    "flash_attn_triton",
    "torch_rocm",
    "habana",
    "torch_xpu",
    "ipex_xpu",
    "hub_activation",
    "hub_flash_attn2",
    "hub_flash_attn3",
    "hub_rmsnorm",
    "torchao",
)
"""Folders that are not loaded: not run on hardware, their adapters were tried with recording fakes of the libraries. One
that has been run moves up. `layerzero compat --unproven` tries those whose library is there."""
