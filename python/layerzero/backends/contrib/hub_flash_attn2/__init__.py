"""kernels-community/flash-attn2 of the Hugging Face hub."""
