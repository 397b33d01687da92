"""A small server loop: continuous batching over a paged key/value cache with shared prompt prefixes.

    python examples/serving.py                 # LayerZero's operations
    python examples/serving.py --with torch    # the same loop over plain torch

The model is a small Llama with random weights. Its answers are noise, but the loop is that of a real server:

- Requests join and leave between steps. A step is either a prefill of new prompts or one token for every running request.
- Keys and values are in pages of ``page_size`` tokens. A request has a block table: the numbers of its pages.
- Prompts that begin with the same tokens share the pages that these tokens fill. Pages are counted, and a page without users
  keeps its content until it is needed for something else.
- On a GPU a decode step is a CUDA graph, one for each bucket of batch sizes and table widths.

``LAYERZERO`` and ``TORCH`` are the operations of the model. Nothing else differs.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import layerzero as lz
import torch
import torch.nn.functional as F
from torch import Tensor

# --- the model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama."""

    vocab: int = 512
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    longest: int = 512
    """Tokens of a prompt and its answer together, at most."""
    eps: float = 1e-5
    theta: float = 10_000.0


class Layer(NamedTuple):
    """The weights of a layer."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The weights of a Llama, random but always the same for a seed."""

    def __init__(self, config: Config, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        generator = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
            return (drawn * columns**-0.5).to(dtype)

        ones = torch.ones(config.hidden, device=device, dtype=dtype)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.embedding = weight(config.vocab, config.hidden) * config.hidden**0.5
        self.layers = [
            Layer(
                attention_norm=ones,
                qkv=weight(queries + 2 * keys, config.hidden) * 2,  # twice as large: attention is sharper
                out=weight(config.hidden, queries),
                mlp_norm=ones,
                gate_up=weight(2 * config.intermediate, config.hidden),
                down=weight(config.hidden, config.intermediate),
            )
            for _ in range(config.layers)
        ]
        self.norm = ones
        self.head = weight(config.vocab, config.hidden)
        half = config.head_dim // 2
        frequencies = config.theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(config.longest, device=device, dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)


# --- the operations -------------------------------------------------------------------------------------------------------


class Operations(NamedTuple):
    """The operations of the model, by one library."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    append: Callable[..., Any]
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    before_capture: Callable[[], AbstractContextManager[Any]]
    """Around the run of a step before it is captured into a CUDA graph."""


LAYERZERO = Operations(
    rms_norm=lz.rms_norm,
    add_rms_norm=lz.fused_add_rms_norm,
    rope=lambda x, cos, sin, positions: lz.rope(x, cos, sin, positions=positions, layout="NHD"),
    silu_mul=lz.silu_mul,
    linear=lz.linear,
    append=lambda k, v, keys, values, slots: lz.kv_append(k, v, keys, values, slots, layout="NHD"),
    decode=lambda q, keys, values, tables, lengths: lz.paged_attention(q, keys, values, tables, lengths, layout="NHD"),
    prefill=lambda q, keys, values, tables, lengths, starts, _: lz.paged_attention(
        q, keys, values, tables, lengths, cu_seqlens_q=starts, causal=True, layout="NHD"
    ),
    before_capture=lz.capture,
)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a sum, and the sum."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def torch_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotates pairs of numbers that are half a head apart."""
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def torch_append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes new keys and values into their slots."""
    slots = slots.long()
    keys.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    values.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def torch_decode(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query per sequence: gathers the pages of all sequences, and masks what is behind their ends."""
    k = keys[tables].flatten(1, 2).transpose(1, 2)  # (batch, heads, width * page_size, head_dim)
    v = values[tables].flatten(1, 2).transpose(1, 2)
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask[:, None, None], enable_gqa=True).squeeze(2)


def torch_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    starts: Tensor,
    shape: list[tuple[int, int]],
) -> Tensor:
    """The queries of each sequence are its last positions. `shape` has each one's queries and keys, known to the host."""
    results, first = [], 0
    for row, (new, length) in enumerate(shape):
        pages = tables[row, : -(-length // keys.shape[1])]
        k = keys[pages].flatten(0, 1)[:length].transpose(0, 1)
        v = values[pages].flatten(0, 1)[:length].transpose(0, 1)
        mask = None
        if new != length:
            mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
        one = q[first : first + new].transpose(0, 1)
        # A batch dimension: without one torch computes attention by its slow path.
        out = F.scaled_dot_product_attention(one[None], k[None], v[None], mask, is_causal=mask is None, enable_gqa=True)
        results.append(out[0].transpose(0, 1))
        first += new
    return torch.cat(results)


TORCH = Operations(
    rms_norm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    add_rms_norm=torch_add_rms_norm,
    rope=torch_rope,
    silu_mul=lambda gate, up: F.silu(gate) * up,
    linear=F.linear,
    append=torch_append,
    decode=torch_decode,
    prefill=torch_prefill,
    before_capture=nullcontext,
)

OPERATIONS = {"layerzero": LAYERZERO, "torch": TORCH}


# --- a step of the model --------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The tokens of a step, packed one sequence after the other."""

    tokens: Tensor
    """(tokens,): their ids."""
    positions: Tensor
    """(tokens,): their positions in their sequences."""
    slots: Tensor
    """(tokens,): where their keys and values go: page * page_size + place in the page."""
    tables: Tensor
    """(batch, width): the pages of each sequence."""
    lengths: Tensor
    """(batch,): how many tokens of each sequence are in the cache, these included."""
    starts: Tensor | None = None
    """(batch + 1,): where each sequence's tokens begin and end. None in a decode step: each has one token."""
    shape: list[tuple[int, int]] | None = None
    """(new tokens, length) of each sequence, for code that needs it on the host."""


def forward(model: Model, by: Operations, batch: Batch, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The likeliest next token of each sequence. Writes the keys and values of the batch's tokens into the caches."""
    config = model.config
    sizes = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
    residual = F.embedding(batch.tokens, model.embedding)
    normed = by.rms_norm(residual, model.layers[0].attention_norm, config.eps)
    for index, (layer, (keys, values)) in enumerate(zip(model.layers, caches, strict=True)):
        q, k, v = (
            part.unflatten(1, (-1, config.head_dim)) for part in by.linear(normed, layer.qkv).split(sizes, dim=1)
        )
        q = by.rope(q, model.cos, model.sin, batch.positions)
        k = by.rope(k, model.cos, model.sin, batch.positions)
        # All new keys and values are written before any are read, so sequences of one batch can share new pages too.
        by.append(k, v, keys, values, batch.slots)
        if batch.starts is None:
            attended = by.decode(q, keys, values, batch.tables, batch.lengths)
        else:
            attended = by.prefill(q, keys, values, batch.tables, batch.lengths, batch.starts, batch.shape)
        mixed = by.linear(attended.flatten(1), layer.out)
        normed, residual = by.add_rms_norm(mixed, residual, layer.mlp_norm, config.eps)
        gate, up = by.linear(normed, layer.gate_up).chunk(2, dim=1)
        mixed = by.linear(by.silu_mul(gate, up), layer.down)
        following = model.layers[index + 1].attention_norm if index + 1 < config.layers else model.norm
        normed, residual = by.add_rms_norm(mixed, residual, following, config.eps)
    if batch.starts is not None:
        normed = normed[batch.starts[1:] - 1]
    return by.linear(normed, model.head).argmax(-1)


# --- pages ----------------------------------------------------------------------------------------------------------------


class Pages:
    """Which pages are used, by how many requests, and which prompts they hold.

    Page 0 is never given out: the rows that fill up a batch to its bucket write there.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._users = [0] * count
        #: Pages without users, the next one to be given out first. A dictionary is an ordered set here.
        self._free = dict.fromkeys(range(1, count))
        self._page_of: dict[bytes, int] = {}
        self._prompt_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many pages have no users."""
        return len(self._free)

    def users(self, page: int) -> int:
        """How many requests use a page."""
        return self._users[page]

    def needed(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, prompt: list[int], tokens: int) -> tuple[list[int], int] | None:
        """Pages for `tokens` tokens that begin with `prompt`, and how many of these are there already; None if too few are free.

        The last token of a prompt is always computed, because the model's answer to it is wanted.
        """
        names = list(self._names(prompt))
        shared: list[int] = []
        for name in names[: (len(prompt) - 1) // self.size]:
            if (page := self._page_of.get(name)) is None:
                break
            shared.append(page)
        revived = sum(self._users[page] == 0 for page in shared)
        if self.needed(tokens) - len(shared) + revived > self.free:
            return None
        for page in shared:
            self._free.pop(page, None)
        pages = shared + [self._new() for _ in range(self.needed(tokens) - len(shared))]
        for page in pages:
            self._users[page] += 1
        # Pages that the prompt fills can be found from now on: they are written before anyone reads them.
        for page, name in zip(pages[len(shared) : len(names)], names[len(shared) :], strict=True):
            if name not in self._page_of:
                self._page_of[name], self._prompt_of[page] = page, name
        return pages, len(shared) * self.size

    def give_back(self, pages: list[int]) -> None:
        """One user less. The end of a prompt is given out again before its beginning, which more prompts share."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None

    def _new(self) -> int:
        page = next(iter(self._free))
        del self._free[page]
        if (name := self._prompt_of.pop(page, None)) is not None:
            del self._page_of[name]
        return page

    def _names(self, prompt: list[int]) -> Iterator[bytes]:
        """A name for each page that the prompt fills: a digest of all tokens up to the page's end."""
        digest = hashlib.sha256()
        for end in range(self.size, len(prompt) + 1, self.size):
            digest.update(array("q", prompt[end - self.size : end]).tobytes())
            yield digest.digest()


# --- the loop -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt, and what has been answered so far."""

    prompt: list[int]
    max_new: int
    stop: int | None = None
    """A token that ends the answer."""
    answer: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """How many of its tokens are in the cache."""
    shared: int = 0
    """How many of them were there before it came."""

    @property
    def done(self) -> bool:
        """Whether nothing more is to be answered."""
        return len(self.answer) == self.max_new or (self.stop is not None and self.answer[-1:] == [self.stop])


class Loop:
    """Requests come in by ``add``; ``step`` does one step for as many as fit."""

    def __init__(
        self,
        model: Model,
        by: Operations = LAYERZERO,
        pages: int = 128,
        page_size: int = 16,
        max_batch: int = 32,
        prefill_tokens: int = 2048,
        graphs: bool = True,
    ) -> None:
        config = model.config
        self.model, self.by = model, by
        self.pages = Pages(pages, page_size)
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        shape = (pages, page_size, config.kv_heads, config.head_dim)
        self.caches = [
            (
                torch.zeros(shape, device=model.device, dtype=model.dtype),
                torch.zeros(shape, device=model.device, dtype=model.dtype),
            )
            for _ in range(config.layers)
        ]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._graphs: Graphs | None = None
        if graphs and model.device.type == "cuda":
            self._graphs = Graphs(self._decoded, model.device, by)

    def add(self, request: Request) -> Request:
        """Puts a request into the queue.

        Raises:
            ValueError: it could never be answered.
        """
        total, longest = len(request.prompt) + request.max_new, self.model.config.longest
        if not request.prompt or request.max_new < 1:
            raise ValueError(
                f"a request needs a prompt and at least one token to answer: it has {len(request.prompt)} tokens and "
                f"max_new={request.max_new}"
            )
        if not all(0 <= token < self.model.config.vocab for token in request.prompt):
            bad = next(token for token in request.prompt if not 0 <= token < self.model.config.vocab)
            raise ValueError(f"token {bad} is not in the vocabulary of {self.model.config.vocab} tokens")
        if total > longest:
            raise ValueError(
                f"a request of {len(request.prompt)} tokens and max_new={request.max_new} is {total} tokens; the model can "
                f"have {longest}. Shorten the prompt or lower max_new"
            )
        if self.pages.needed(total) > self.pages.count - 1:
            raise ValueError(
                f"a request of {total} tokens needs {self.pages.needed(total)} pages of {self.pages.size}; the cache has "
                f"{self.pages.count - 1}. Shorten the prompt, lower max_new, or give the loop more pages"
            )
        self.waiting.append(request)
        return request

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Prefills prompts that now fit, or adds a token to every running request. Gives back the requests that are done."""
        if admitted := self._admitted():
            worked, tokens = admitted, self._prefill(admitted)
            self.running += admitted
        elif self.running:
            worked, tokens = self.running, self._decode(self.running)
        else:
            return []
        for request, token in zip(worked, tokens, strict=True):
            request.cached = len(request.prompt) + len(request.answer)
            request.answer.append(token)
        done = [request for request in worked if request.done]
        for request in done:
            self.pages.give_back(request.pages)
            request.pages = []
        self.running = [request for request in self.running if not request.done]
        return done

    def run(self) -> list[Request]:
        """Steps until nothing is left to do. Gives back the requests in the order in which they were done."""
        done = []
        while self.waiting or self.running:
            done += self.step()
        return done

    def _admitted(self) -> list[Request]:
        """The waiting requests that begin now, with all pages they can ever need: none of them has to wait in the middle."""
        admitted: list[Request] = []
        tokens = 0
        while self.waiting and len(self.running) + len(admitted) < self.max_batch:
            request = self.waiting[0]
            if admitted and tokens + len(request.prompt) > self.prefill_tokens:
                break
            taken = self.pages.take(request.prompt, len(request.prompt) + request.max_new)
            if taken is None:
                break
            request.pages, request.cached = taken
            request.shared = request.cached
            tokens += len(request.prompt) - request.cached
            admitted.append(self.waiting.popleft())
        return admitted

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // self.pages.size] * self.pages.size + position % self.pages.size

    def _prefill(self, requests: list[Request]) -> list[int]:
        """The first answered token of each prompt. Tokens that are in the cache are not computed again."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        width = max(self.pages.needed(len(request.prompt)) for request in requests)
        for request in requests:
            new = range(request.cached, len(request.prompt))
            tokens += request.prompt[request.cached :]
            positions += new
            slots += [self._slot(request, position) for position in new]
            starts.append(len(tokens))
        tables = [(request.pages + [0] * width)[:width] for request in requests]
        lengths = [len(request.prompt) for request in requests]
        shape = [(len(request.prompt) - request.cached, len(request.prompt)) for request in requests]
        device = self.model.device
        fields = [
            torch.tensor(x, dtype=torch.int32, device=device)
            for x in (tokens, positions, slots, tables, lengths, starts)
        ]
        return forward(self.model, self.by, Batch(*fields, shape), self.caches).tolist()

    def _decode(self, requests: list[Request]) -> list[int]:
        """The next token of each running request."""
        lengths = [len(request.prompt) + len(request.answer) for request in requests]
        width = _power_of_two(max(self.pages.needed(length) for length in lengths))
        rows = _power_of_two(len(requests)) if self._graphs else len(requests)
        # Rows that fill up the bucket have one token, in page 0.
        empty = rows - len(requests)
        positions = [length - 1 for length in lengths]
        slots = [self._slot(request, position) for request, position in zip(requests, positions, strict=True)]
        flat = [request.answer[-1] for request in requests] + [0] * empty
        flat += positions + [0] * empty
        flat += slots + [0] * empty
        flat += lengths + [1] * empty
        for request in requests:
            flat += (request.pages + [0] * width)[:width]
        flat += [0] * (empty * width)
        packed = torch.tensor(flat, dtype=torch.int32)
        if self._graphs:
            return self._graphs.run(packed, rows, width).tolist()[: len(requests)]
        return self._decoded(packed.to(self.model.device), rows, width).tolist()

    def _decoded(self, packed: Tensor, rows: int, width: int) -> Tensor:
        """A decode step out of one tensor, so that a step needs one copy to the device."""
        tokens, positions, slots, lengths, tables = packed.split([rows, rows, rows, rows, rows * width])
        batch = Batch(tokens, positions, slots, tables.view(rows, width), lengths)
        return forward(self.model, self.by, batch, self.caches)


class Graphs:
    """Decode steps as CUDA graphs, one for each number of rows and width of the tables."""

    def __init__(self, step: Callable[[Tensor, int, int], Tensor], device: torch.device, by: Operations) -> None:
        self._step, self._device, self._by = step, device, by
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None

    def run(self, packed: Tensor, rows: int, width: int) -> Tensor:
        """The step's result, by a replay."""
        if (rows, width) not in self._captured:
            self._captured[rows, width] = self._capture(packed.to(self._device), rows, width)
        graph, given, result = self._captured[rows, width]
        given.copy_(packed, non_blocking=True)
        graph.replay()
        return result

    def _capture(self, given: Tensor, rows: int, width: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        # A step that is run twice writes the same keys and values into the same slots.
        with self._by.before_capture():
            self._step(given, rows, width)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(given, rows, width)
        self._pool = graph.pool()
        return graph, given, result


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# --- a day at the server --------------------------------------------------------------------------------------------------


def requests(count: int, vocab: int, prefix: int = 40, longest: int = 60, seed: int = 0) -> list[Request]:
    """Prompts that begin with the same `prefix` tokens and go on differently, with answers of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    common = drawn(0, vocab, prefix)
    return [Request(common + drawn(0, vocab, drawn(1, longest, 1)[0]), drawn(4, 32, 1)[0]) for _ in range(count)]


def main() -> None:
    """Serves some requests, and says how fast."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--with", dest="by", default="layerzero", choices=list(OPERATIONS), help="who serves the operations"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=24)
    options = parser.parse_args()
    model = Model(Config(), options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    loop = Loop(model, OPERATIONS[options.by])
    asked = [loop.add(request) for request in requests(options.requests, model.config.vocab)]
    begun = time.perf_counter()
    steps = 0
    while loop.waiting or loop.running:
        loop.step()
        steps += 1
    seconds = time.perf_counter() - begun
    answered = sum(len(request.answer) for request in asked)
    prompts, shared = sum(len(request.prompt) for request in asked), sum(request.shared for request in asked)
    print(
        f"{len(asked)} requests in {steps} steps by {options.by}: {answered} tokens, {answered / seconds:,.0f} per second"
    )
    print(
        f"{shared} of {prompts} prompt tokens were in shared pages; {loop.pages.free} of {loop.pages.count - 1} pages are free"
    )
    print("the first answer:", asked[0].answer)


if __name__ == "__main__":
    main()
