"""Nodes that run as one step: the results of one call, a product with its bias, and a sum with the norm that reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import layerzero as lz
from layerzero.device_graphs.joined_weights import beside, together
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
        joins: Callable[[Sequence[str]], bool],
        same: Callable[[str], object],
    ) -> None:
        self._nodes, self._host, self._number, self._same = nodes, host, number, same
        self._made = {node.output: node for node in nodes}
        self._place = {node.output: at for at, node in enumerate(nodes)}
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._shapes |= {node.output: node.shape for node in nodes}
        #: How often each value is read, or given to the caller.
        self._reads = Counter(kept)
        self._reads.update(name for node in nodes for name in node.inputs if name is not None)
        self._taken: set[str] = set()
        self._biased = self._biased_products()
        self._joined = self._joined_products(joins)

    def steps(self) -> list[Step]:
        """The steps, in the order of the nodes that are first in each."""
        norms, ropes = self._norms_of_sums(), self._pairs_of_ropes()
        found = []
        for node in self._nodes:
            if node.output in self._taken:
                continue
            if node.op == "host":
                found.append(self._call(node))
            elif (norm := norms.get(node.output)) is not None:
                self._taken.add(norm.output)
                found.append(_sum_and_norm(node, norm))
            elif (group := self._joined.get(node.output)) is not None:
                found.append(self._joined_product(group))
            elif (added := self._biased.get(node.output)) is not None:
                self._taken.add(added.output)
                found.append(self._product(node, added))
            elif (other := ropes.get(node.output)) is not None:
                self._taken.add(other.output)
                found.append(_two_ropes(node, other))
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

    def _joined_products(self, joins: Callable[[Sequence[str]], bool]) -> dict[str, list[Node]]:
        """By the name of the first: products of one value with weights that lie beside each other, which are one product."""
        groups: dict[tuple[Any, ...], list[Node]] = {}
        for node in self._nodes:
            if node.op != "matmul" or not node.transpose_b or node.transpose_a:
                continue
            weight = str(node.inputs[1])
            alone = node.attributes.get("alpha", 1.0) == 1.0 and self._reads[weight] == 1
            if alone and weight not in self._made and len(self._shapes[weight]) == 2 and len(node.shape) >= 2:
                groups.setdefault((node.inputs[0], node.output in self._biased), []).append(node)
        found = {}
        for (_, biased), group in groups.items():
            names = [[str(node.inputs[1]) for node in group]]
            if biased:
                names.append([self._bias(node) for node in group])
            if len(group) > 1 and all(joins(one) for one in names):
                found[group[0].output] = group
        return found

    def _bias(self, product: Node) -> str:
        return next(str(name) for name in self._biased[product.output].inputs if name != product.output)

    def _joined_product(self, group: Sequence[Node]) -> Step:
        """Several products as one, and its parts."""
        count, sizes = len(group), [node.shape[-1] for node in group]
        biased = group[0].output in self._biased
        nodes = list(group)
        reads = [group[0].inputs[0], *(node.inputs[1] for node in group)]
        if biased:
            nodes += [self._biased[node.output] for node in group]
            reads += [self._bias(node) for node in group]
        self._taken.update(node.output for node in nodes)

        def run(x: Any, *weights: Any) -> tuple[Any, ...]:
            parts = [weights[:count], weights[count:]] if biased else [weights]
            if not all(map(beside, parts)):
                # Somebody has moved a weight since.
                ones = weights[count:] if biased else [None] * count
                return tuple(lz.linear(x, one, bias) for one, bias in zip(weights, ones, strict=False))
            bias = together(weights[count:]) if biased else None
            return torch.split_with_sizes(lz.linear(x, together(weights[:count]), bias), sizes, -1)

        makes = [node.output for node in nodes[-count:]]
        return Step(tuple(nodes), Work(run, "linear", chosen=True), tuple(reads), tuple(makes))

    def _pairs_of_ropes(self) -> dict[str, Node]:
        """By the name of a rotary embedding: another one by the same tables, whose input is there too."""
        found: dict[str, Node] = {}
        before: dict[tuple[Any, ...], Node] = {}
        for node in self._nodes:
            if node.op != "rope":
                continue
            key = (*(self._same(str(name)) for name in node.inputs[1:]), node.attributes.get("interleaved", False))
            first = before.pop(key, None)
            if first is not None and self._behind(first, node):
                found[first.output] = node
            else:
                before[key] = node
        return found

    def _behind(self, first: Node, second: Node) -> bool:
        """Whether both inputs are views of parts of one joined product, and the second's is there before the first runs."""
        source = self._source(str(first.inputs[0]), first)
        return source is not None and source == self._source(str(second.inputs[0]), first)

    def _source(self, name: str, before: Node) -> str | None:
        """The joined product that a value is a view of, by the name of its first part. All of it is made before a node."""
        while (made := self._made.get(name)) is not None and made.op in ("reshape", "permute"):
            if self._place[made.output] > self._place[before.output]:
                return None
            name = str(made.inputs[0])
        for first, group in self._joined.items():
            parts = [self._biased.get(node.output, node) for node in group]
            if name in [node.output for node in parts]:
                return first
        return None

    def _product(self, product: Node, added: Node) -> Step:
        bias = next(name for name in added.inputs if name != product.output)
        reads = (*product.inputs, bias)
        if product.transpose_b:
            return Step((product, added), Work(lz.linear, "linear", chosen=True), reads, (added.output,))

        def run(x: Any, weight: Any, bias: Any) -> Any:
            return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(added.shape)

        return Step((product, added), Work(run, "torch.addmm"), reads, (added.output,))


def _two_ropes(first: Node, second: Node) -> Step:
    """Two rotary embeddings: one call where their inputs lie beside each other, heads behind heads."""
    one, two = RUNNERS["rope"](first), RUNNERS["rope"](second)

    def run(a: Any, cos: Any, sin: Any, b: Any) -> tuple[Any, ...]:
        if (both := _heads_of_both(a, b)) is None:
            return one.run(a, cos, sin), two.run(b, cos, sin)
        found = one.run(both, cos, sin)
        return found[:, : a.shape[1]], found[:, a.shape[1] :]

    reads = (*first.inputs, second.inputs[0])
    return Step((first, second), Work(run, "rope", chosen=True), reads, (first.output, second.output))


def _heads_of_both(a: Any, b: Any) -> Any:
    """Two tensors (batch, heads, positions, width) of one memory as one with the heads of both, where they lie so."""
    if a.dim() != 4 or a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:]:
        return None
    # The stride of an axis of one element says nothing.
    if any(one.shape[axis] > 1 and a.stride(axis) != b.stride(axis) for axis in (0, 2, 3) for one in (a, b)):
        return None
    if any(one.shape[1] > 1 and one.stride(1) != one.shape[3] for one in (a, b)):
        return None
    heads, apart = a.shape[1], a.shape[3]
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    if b.storage_offset() != a.storage_offset() + heads * apart or a.stride(3) != 1:
        return None
    strides = (a.stride(0), apart, a.stride(2), 1)
    return a.as_strided((a.shape[0], heads + b.shape[1], *a.shape[2:]), strides)


def _sum_and_norm(added: Node, norm: Node) -> Step:
    eps = norm.eps
    work = Work(
        lambda x, residual, weight=None: lz.fused_add_rms_norm(x, residual, weight, eps),
        "fused_add_rms_norm",
        chosen=True,
    )
    return Step((added, norm), work, (*added.inputs, *norm.inputs[1:]), (norm.output, added.output))
