"""Benchmarks of what LayerZero costs, side by side with what it is compared to, in one process."""
