"""Tokens out of logits, without sorting them."""
