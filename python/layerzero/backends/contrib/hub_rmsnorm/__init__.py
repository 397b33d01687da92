"""kernels-community/rmsnorm of the Hugging Face hub."""
