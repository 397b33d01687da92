"""quack."""
