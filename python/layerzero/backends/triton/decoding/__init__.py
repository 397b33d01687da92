"""Attention of one new query per sequence over what came before it."""
