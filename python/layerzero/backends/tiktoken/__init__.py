"""tiktoken."""
