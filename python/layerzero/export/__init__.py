"""From a torch module to a graph, by torch.export and a small handler for each ATen op. Weights are not copied.

| files | what is there |
|---|---|
| `exporting.py` | `export`: inputs, nodes, results, in this order |
| `building.py` | writes the document: values, nodes, constants, casts |
| `handlers/` | translates ATen ops to operations of the graph, a file for each family; `registry.py` has the list |
| `sizes.py` | sizes with symbols, as the graph has them |
| `host_calls.py` | calls that stay torch's |
| `refusals.py` | errors for models that cannot be exported, with the line that is the cause |
"""

from layerzero.export.exporting import Exported, export

__all__ = ["Exported", "export"]
