"""kernels-community/flash-attn3 of the Hugging Face hub."""
