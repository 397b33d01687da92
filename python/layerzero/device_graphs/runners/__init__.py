"""How each operation of a graph runs on a device. One function for each, in the file of its family.

A runner gets a node and answers with :class:`Work`: a function of the node's inputs. What depends on sizes and attributes is
decided once, while the program is made. Functions of LayerZero are called where there is one, so that the engine chooses.
"""

from layerzero.device_graphs.runners.registry import RUNNERS, runs

from layerzero.device_graphs.runners import (  # isort: skip - each adds its own to the list
    attention,
    creation,
    elementwise,
    indexing,
    layers,
    reductions,
    shapes,
)

__all__ = ["RUNNERS", "attention", "creation", "elementwise", "indexing", "layers", "reductions", "runs", "shapes"]
