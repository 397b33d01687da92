"""From a torch module to a graph: torch.export, one small handler for each ATen op, weights by reference.

| files | what is there |
|---|---|
| `exporting.py` | `export`: inputs, nodes, results, in this order |
| `building.py` | the document while it is written: values, nodes, constants, casts |
| `handlers/` | what each ATen op is in operations of the graph, by families; `registry.py` has the list |
| `sizes.py` | sizes with symbols as the graph reads them |
| `host_calls.py` | calls that stay torch's |
| `refusals.py` | models that cannot be exported, with the line that is the cause |
"""

from layerzero.export.exporting import Exported, export

__all__ = ["Exported", "export"]
