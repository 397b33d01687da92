"""Measuring kernels on this machine: ``lz.tune``, ``lz.regret``."""

from __future__ import annotations

from layerzero.tuning.api import explain_call, regret, tune, workload

__all__ = ["explain_call", "regret", "tune", "workload"]
