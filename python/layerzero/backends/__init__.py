"""The libraries LayerZero can call: one folder each, with `capabilities.json` and `adapter.py`."""

BACKENDS: tuple[str, ...] = (
    "torch",
    "torch_cuda",
    "torch_any",
    "triton",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flash_attn_4_tiles",
    "flash_attn_4_pages",
    "flashinfer",
    "flashinfer_prefill",
    "liger",
    "apex",
    "quack",
    "cudnn",
    "onednn",
    "zentorch",
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
    "xformers",
    "hub_activation",
    "hub_flash_attn2",
    "hub_flash_attn3",
    "hub_rmsnorm",
    "torchao",
)
"""Folders whose kernels were never run on the hardware they are for: their adapters were tried with recording fakes of the
libraries. Their documents say ``"proven": false``. They are loaded where the setting ``backends.unproven`` names them or
their library. One that has been run moves up. `layerzero compat --unproven` tries those whose library is there."""
