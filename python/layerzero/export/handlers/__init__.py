"""What each ATen op, and each operator of LayerZero's own, is in operations of the graph.

A handler gets the builder, the call (what torch says of its results), and the arguments of the op's schema in order, those not
given by their defaults. It returns a value, or as many as the op has results. It returns `NotImplemented` for a call it does not
translate, which then stays torch's. Handlers write primitives: which of them make a faster operation is known to the passes.
"""

from layerzero.export.handlers import creation, elementwise, indexing, layers, own_operators, reductions, views
from layerzero.export.handlers.registry import HANDLERS, Call

__all__ = [
    "HANDLERS",
    "Call",
    "creation",
    "elementwise",
    "indexing",
    "layers",
    "own_operators",
    "reductions",
    "views",
]
