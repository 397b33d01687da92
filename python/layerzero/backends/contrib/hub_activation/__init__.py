"""kernels-community/activation of the Hugging Face hub."""
