"""What random modules are written of: lines of code, most of them careless. torch refuses those that do not fit.

A file for each kind of operation. A maker takes the module as it is so far and gives a line; `making.LINES` has all of them.
The order of the imports is the order of that list, and seeds of regressions depend on it: add a file at the end.
"""

# ruff: noqa: I001
from random_lines import elementwise, shapes, reductions, products, layers, attention, convolutions, indexing, creating
from random_lines.making import LINES

__all__ = [
    "LINES",
    "attention",
    "convolutions",
    "creating",
    "elementwise",
    "indexing",
    "layers",
    "products",
    "reductions",
    "shapes",
]
