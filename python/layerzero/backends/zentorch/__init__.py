"""AMD ZenDNN through the zentorch plugin."""
