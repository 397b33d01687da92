"""Nodes that run as one step: the results of one call, a product with its bias, and a sum with the norm that reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import layerzero as lz
from layerzero.device_graphs.nodes import Node, Step, Work
from layerzero.device_graphs.runners import RUNNERS

if TYPE_CHECKING:
    from layerzero.export.host_calls import HostCalls

#: Passes that are left out for devices. A sum is added by the norm behind it, and not by the product before it.
LEFT_OUT = ("residual", "add_norm")


class Fusing:
    """Makes the steps of a program. `shapes` are those of all inputs and constants."""

    def __init__(
        self,
        nodes: Sequence[Node],
        shapes: Mapping[str, Sequence[int]],
        kept: Iterable[str],
        host: HostCalls | None,
        number: Callable[[str], int],
    ) -> None:
        self._nodes, self._host, self._number = nodes, host, number
        self._made = {node.output: node for node in nodes}
        self._shapes = {**{name: tuple(shape) for name, shape in shapes.items()}}
        self._shapes |= {node.output: node.shape for node in nodes}
        #: How often each value is read, or given to the caller.
        self._reads = Counter(kept)
        self._reads.update(name for node in nodes for name in node.inputs if name is not None)
        self._taken: set[str] = set()

    def steps(self) -> list[Step]:
        """The steps, in the order of the nodes that are first in each."""
        norms, biases = self._norms_of_sums(), self._biased_products()
        found = []
        for node in self._nodes:
            if node.output in self._taken:
                continue
            if node.op == "host":
                found.append(self._call(node))
            elif (norm := norms.get(node.output)) is not None:
                self._taken.add(norm.output)
                found.append(_sum_and_norm(node, norm))
            elif (added := biases.get(node.output)) is not None:
                self._taken.add(added.output)
                found.append(self._product(node, added))
            else:
                found.append(Step((node,), RUNNERS[node.op](node), node.inputs, (node.output,)))
        return found

    def _call(self, node: Node) -> Step:
        """A call of torch's with all of its results."""
        assert self._host is not None, "who exports a call keeps it"
        parts = tuple(one for one in self._nodes if one.op == "host" and one.call == node.call)
        self._taken.update(one.output for one in parts)
        which = tuple(one.result for one in parts)
        call = self._host.calls[node.call].with_numbers(node.inputs, self._number)

        def run(*inputs: Any) -> tuple[Any, ...]:
            results = call(inputs)
            several = results if isinstance(results, (tuple, list)) else [results]
            return tuple(several[at] for at in which)

        return Step(parts, Work(run, node.target), node.inputs, tuple(one.output for one in parts), alone=True)

    def _norms_of_sums(self) -> dict[str, Node]:
        """By the name of a sum: the first RMSNorm that reads it, where both are one kernel."""
        found: dict[str, Node] = {}
        for node in self._nodes:
            made = self._made.get(str(node.inputs[0])) if node.op == "rms_norm" else None
            if made is None or made.op != "binary" or made.kind != "add":
                continue
            # What the norm multiplies with is there before the sum is.
            if len(node.inputs) > 1 and node.inputs[1] in self._made:
                continue
            if all(self._shapes[str(name)] == made.shape for name in made.inputs) and made.output not in found:
                found[made.output] = node
        return found

    def _biased_products(self) -> dict[str, Node]:
        """By the name of a product with a matrix: the vector that is added to it, where nothing else reads the product."""
        found = {}
        for node in self._nodes:
            if node.op != "binary" or node.kind != "add":
                continue
            for name, other in (node.inputs, node.inputs[::-1]):
                product = self._made.get(str(name))
                if product is None or product.op != "matmul" or self._reads[product.output] != 1:
                    continue
                columns = (product.shape[-1],)
                plain = product.attributes.get("alpha", 1.0) == 1.0 and not product.transpose_a
                matrix = len(self._shapes[str(product.inputs[1])]) == 2 and len(product.shape) >= 2
                # A vector that is made only after the product is not there when the product runs.
                if plain and matrix and self._shapes[str(other)] == columns and other not in self._made:
                    found[product.output] = node
                    break
        return found

    def _product(self, product: Node, added: Node) -> Step:
        bias = next(name for name in added.inputs if name != product.output)
        reads = (*product.inputs, bias)
        if product.transpose_b:
            return Step((product, added), Work(lz.linear, "linear", chosen=True), reads, (added.output,))

        def run(x: Any, weight: Any, bias: Any) -> Any:
            return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(added.shape)

        return Step((product, added), Work(run, "torch.addmm"), reads, (added.output,))


def _sum_and_norm(added: Node, norm: Node) -> Step:
    eps = norm.eps
    work = Work(
        lambda x, residual, weight=None: lz.fused_add_rms_norm(x, residual, weight, eps),
        "fused_add_rms_norm",
        chosen=True,
    )
    return Step((added, norm), work, (*added.inputs, *norm.inputs[1:]), (norm.output, added.output))
