"""xFormers' memory-efficient attention."""
