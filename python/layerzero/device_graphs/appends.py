"""Keys and values of new tokens, written to the two caches of a layer by one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import layerzero as lz
from layerzero.device_graphs.cache_pages import as_pages, pages_of
from layerzero.device_graphs.nodes import Node, Step, Work


def joined(steps: Sequence[Step], shapes: Mapping[str, Sequence[int]]) -> list[Step]:
    """The steps, in which two that write the same places of two caches are one."""
    found: list[Step] = []
    waiting: dict[tuple[Any, ...], int] = {}
    slots: set[str] = set()
    for step in steps:
        key = _key(step)
        at = waiting.pop(key, None) if key is not None else None
        if at is not None and not _read_between(found[at], found[at + 1 :]):
            first = found.pop(at)
            waiting = {other: place - (place > at) for other, place in waiting.items()}
            if (numbered := _slots(first, shapes.get(str(first.reads[1]), (1,))[0])).makes[0] not in slots:
                slots.update(numbered.makes)
                found.append(numbered)
            found.append(_both_caches(first, step, numbered.makes[0]))
            continue
        if key is not None:
            waiting[key] = len(found)
        found.append(step)
    return found


def _key(step: Step) -> tuple[Any, ...] | None:
    """What two steps share that write the same places."""
    if not step.work.in_place or step.last.op != "index_copy" or len(step.last.shape) != 4:
        return None
    axis = step.last.axis % 4
    return (step.reads[1], *step.last.shape[:3]) if axis == 2 else None


def _read_between(step: Step, later: Sequence[Step]) -> bool:
    return any(name in other.reads for other in later for name in step.makes)


def _slots(step: Step, tokens: int) -> Step:
    """The numbers of the slots that a step writes, in the pages of all sequences. All layers write the same."""
    node, places = step.last, str(step.reads[1])
    batch, _, capacity, _ = node.shape

    def run(places: Any) -> Any:
        if batch == 1:
            return places
        begins = torch.arange(0, batch * capacity, capacity, device=places.device)
        return (begins[:, None] + places).reshape(-1)

    name = f"{places}.slots.{batch}.{capacity}"
    made = Node("slots", {}, (places,), name, torch.int64, (batch * tokens,), node.origin)
    return Step((made,), Work(run, "torch.add", view=batch == 1), (places,), (name,))


def _both_caches(first: Step, second: Step, slots: str) -> Step:
    def run(keys: Any, at: Any, key: Any, values: Any, value: Any, slots: Any) -> tuple[Any, ...]:
        pages = pages_of(keys)
        alike = keys.dtype == values.dtype and keys.dtype.is_floating_point and keys.shape == values.shape
        if pages is None or not alike or pages_of(values) != pages:
            return first.work.run(keys, at, key), second.work.run(values, at, value)
        batch, heads, tokens, _ = key.shape
        key, value = (one.transpose(1, 2).reshape(batch * tokens, heads, one.shape[3]) for one in (key, value))
        lz.kv_append(key, value, as_pages(keys, pages), as_pages(values, pages), slots, layout="nhd")
        return keys, values

    reads = (*first.reads, second.reads[0], second.reads[2], slots)
    nodes = (*first.nodes, *second.nodes)
    return Step(nodes, Work(run, "kv_append", chosen=True, in_place=True), reads, (*first.makes, *second.makes))
