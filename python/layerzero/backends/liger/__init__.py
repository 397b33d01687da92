"""Liger."""
