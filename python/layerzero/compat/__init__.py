"""Which libraries work here, alone and beside each other: found by trying them, and kept.

``layerzero compat`` tries every backend in a process of its own (:mod:`.probe`), writes what it found
(:mod:`.matrix`), and a backend that was found to be incompatible in exactly these versions is not imported.
"""

from __future__ import annotations

from layerzero.compat.matrix import problem

__all__ = ["problem"]
