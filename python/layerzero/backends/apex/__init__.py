"""Apex."""
