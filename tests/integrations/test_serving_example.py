"""examples/serving.py: its answers are those of the model computed anew for every token, and its pages are counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem + "_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


serving: Any = _imported(ROOT / "examples" / "serving.py")
BOTH = pytest.mark.parametrize("by", ["layerzero", "torch"])
SMALL = serving.Config(vocab=97, hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2, head_dim=16, longest=128)


def _next(model: Any, tokens: list[int]) -> tuple[int, float]:
    """The likeliest next token by the model's definition: float64, no cache, no pages, all positions. And by how much."""
    config = model.config

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.eps).sqrt() * weight.double()

    half = config.head_dim // 2
    angles = torch.arange(len(tokens), dtype=torch.float64)[:, None] * config.theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # e^(i·angle), of each position and pair

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    x = model.embedding.double()[torch.tensor(tokens)]
    future = torch.full((len(tokens), len(tokens)), float("-inf"), dtype=torch.float64).triu(1)
    for layer in model.layers:
        parts = (norm(x, layer.attention_norm) @ layer.qkv.double().T).unflatten(1, (-1, config.head_dim))
        q, k, v = parts.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        k, v = (part.repeat_interleave(config.heads // config.kv_heads, dim=1) for part in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / config.head_dim**0.5 + future
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ layer.out.double().T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, dim=1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down.double().T
    logits = norm(x[-1], model.norm) @ model.head.double().T
    two = logits.topk(2).values
    return int(logits.argmax()), float(two[0] - two[1])


def _answer(model: Any, prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        token, lead = _next(model, tokens)
        assert lead > 1e-4, "the test's own tokens are too close for float32"
        tokens.append(token)
    return tokens[len(prompt) :]


def _prompts(count: int, seed: int, low: int = 1, high: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, SMALL.vocab, (size,), generator=generator).tolist() for size in sizes]


@BOTH
def test_the_answers_are_those_of_the_model_computed_anew(by: str) -> None:
    model = serving.Model(SMALL, seed=3)
    loop = serving.Loop(model, serving.OPERATIONS[by], pages=40, page_size=8, max_batch=4, prefill_tokens=48)
    prompts = _prompts(9, 1)
    news = [3, 12, 1, 7, 9, 2, 15, 5, 8]
    asked = [loop.add(serving.Request(list(prompt), new)) for prompt, new in zip(prompts, news, strict=True)]
    done = loop.run()
    assert len(done) == len(asked) and {id(one) for one in done} == {id(one) for one in asked}
    for request, prompt, new in zip(asked, prompts, news, strict=True):
        assert request.answer == _answer(model, prompt, new)
    assert len({token for request in asked for token in request.answer}) > 10


@BOTH
def test_requests_join_while_others_run(by: str) -> None:
    model = serving.Model(SMALL, seed=4)
    loop = serving.Loop(model, serving.OPERATIONS[by], pages=30, page_size=4, max_batch=8)
    first, second, third = _prompts(3, 2, 5, 20)
    one = loop.add(serving.Request(list(first), 10))
    for _ in range(4):
        loop.step()
    two = loop.add(serving.Request(list(second), 4))
    loop.step()
    assert len(one.answer) == 4 and len(two.answer) == 1 and loop.running == [one, two]
    three = loop.add(serving.Request(list(third), 6))
    loop.run()
    assert [one.answer, two.answer, three.answer] == [
        _answer(model, first, 10),
        _answer(model, second, 4),
        _answer(model, third, 6),
    ]


@BOTH
def test_a_common_prefix_is_stored_once(by: str) -> None:
    model = serving.Model(SMALL, seed=5)
    loop = serving.Loop(model, serving.OPERATIONS[by], pages=40, page_size=8)
    (common,) = _prompts(1, 3, 29, 30)  # 29 tokens: three full pages, and five tokens of a fourth
    tails = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    asked = [loop.add(serving.Request(common + tail, 6)) for tail in tails]
    loop.step()
    tables = [request.pages for request in asked]
    assert [request.shared for request in asked] == [0, 24, 24]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert [loop.pages.users(page) for page in tables[0][:3]] == [3, 3, 3]
    # Nothing behind the full pages is shared: each request writes there.
    behind = [page for table in tables for page in table[3:]]
    assert len(set(behind)) == len(behind) and all(loop.pages.users(page) == 1 for page in behind)
    used = 3 + sum(loop.pages.needed(len(common) + len(tail) + 6) - 3 for tail in tails)
    assert loop.pages.free == 39 - used
    loop.run()
    assert [request.answer for request in asked] == [_answer(model, common + tail, 6) for tail in tails]


@BOTH
def test_a_prefix_is_found_after_its_request_is_done(by: str) -> None:
    model = serving.Model(SMALL, seed=6)
    loop = serving.Loop(model, serving.OPERATIONS[by], pages=12, page_size=8)
    (prompt,) = _prompts(1, 4, 24, 25)
    loop.add(serving.Request(list(prompt), 3))
    loop.run()
    again = loop.add(serving.Request(list(prompt), 3))
    loop.run()
    assert again.shared == 16, "the last token is computed, so the third page is not shared"
    assert again.answer == _answer(model, prompt, 3)
    # 80 tokens of other requests need every page: what was kept is written over, and not found any more.
    (other,) = _prompts(1, 5, 80, 81)
    loop.add(serving.Request(list(other), 8))
    loop.run()
    third = loop.add(serving.Request(list(prompt), 3))
    loop.run()
    assert third.shared == 0 and third.answer == again.answer


def test_the_same_tokens_after_another_beginning_are_not_shared() -> None:
    model = serving.Model(SMALL, seed=8)
    loop = serving.Loop(model, pages=40, page_size=8)
    first, second, middle = _prompts(3, 10, 8, 9)
    prompts = [first + middle + [1], second + middle + [2], second + middle + [3]]
    asked = [loop.add(serving.Request(list(prompt), 5)) for prompt in prompts]
    loop.step()
    assert [request.shared for request in asked] == [0, 0, 16]
    assert asked[2].pages[:2] == asked[1].pages[:2] and asked[1].pages[1] != asked[0].pages[1]
    loop.run()
    assert [request.answer for request in asked] == [_answer(model, prompt, 5) for prompt in prompts]


@BOTH
def test_pages_are_given_back(by: str) -> None:
    loop = serving.Loop(serving.Model(SMALL), serving.OPERATIONS[by], pages=16, page_size=8, max_batch=4)
    asked = [loop.add(serving.Request(prompt, 5)) for prompt in _prompts(12, 6)]
    least = 15
    while loop.waiting or loop.running:
        loop.step()
        held = {page for request in loop.running for page in request.pages}
        assert loop.pages.free == 15 - len(held) and 0 not in held
        least = min(least, loop.pages.free)
    assert loop.pages.free == 15 and least < 8 and all(len(request.answer) == 5 for request in asked)
    assert all(loop.pages.users(page) == 0 for page in range(16))


def test_a_request_waits_until_there_are_pages() -> None:
    loop = serving.Loop(serving.Model(SMALL), pages=5, page_size=8)
    first = loop.add(serving.Request([1] * 17, 8))  # all four pages
    second = loop.add(serving.Request([2] * 9, 4))
    loop.step()
    loop.step()
    assert loop.pages.free == 0 and loop.running == [first] and list(loop.waiting) == [second]
    assert [one is second for one in loop.run()] == [False, True]


def test_a_stop_token_ends_an_answer() -> None:
    model = serving.Model(SMALL, seed=3)
    (prompt,) = _prompts(1, 1, 10, 11)
    whole = _answer(model, prompt, 12)
    loop = serving.Loop(model)
    request = loop.add(serving.Request(prompt, 12, stop=whole[4]))
    loop.run()
    assert request.answer == whole[: whole.index(whole[4]) + 1] and loop.pages.free == loop.pages.count - 1


@pytest.mark.parametrize(
    ("prompt", "new", "pages", "said"),
    [
        ([1] * 100, 29, 40, "129 tokens; the model can have 128. Shorten the prompt or lower max_new"),
        ([1] * 60, 21, 11, "81 tokens needs 11 pages of 8; the cache has 10"),
        ([], 3, 40, "it has 0 tokens and max_new=3"),
        ([1], 0, 40, "max_new=0"),
        ([1, 97], 3, 40, "token 97 is not in the vocabulary of 97 tokens"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(prompt: list[int], new: int, pages: int, said: str) -> None:
    loop = serving.Loop(serving.Model(SMALL), pages=pages, page_size=8)
    with pytest.raises(ValueError, match=said):
        loop.add(serving.Request(prompt, new))
    assert not loop.waiting and loop.pages.free == pages - 1


def test_the_longest_request_that_fits_is_answered() -> None:
    model = serving.Model(SMALL, seed=7)
    loop = serving.Loop(model, pages=17, page_size=8)
    prompt = _prompts(1, 8, 125, 126)[0]
    request = loop.add(serving.Request(prompt, 3))
    loop.run()
    assert request.answer == _answer(model, prompt, 3)


def test_the_benchmark_compares_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench: Any = _imported(ROOT / "bench" / "gpu" / "serving_loop.py")
    where = tmp_path / "result.json"
    small = ["--device", "cpu", "--tiny", "--rounds", "1", "--warm-seconds", "0", "--rows", "16 requests"]
    bench.main([*small, "--json", str(where)])
    result = json.loads(where.read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert result["failures"] == {} and row["same_answers"] == 1.0 and row["ratio"] > 0
    assert set(row["tokens_per_s"]) == {"layerzero", "torch"} and "| 16 requests |" in capsys.readouterr().out


@pytest.mark.gpu
@BOTH
def test_graphs_give_the_same_answers(by: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = serving.Model(SMALL, "cuda", torch.float32, seed=3)
    prompts, answers = _prompts(7, 9), []
    for graphs in (False, True):
        loop = serving.Loop(model, serving.OPERATIONS[by], pages=60, page_size=16, max_batch=4, graphs=graphs)
        asked = [loop.add(serving.Request(list(prompt), 9)) for prompt in prompts]
        loop.run()
        answers.append([request.answer for request in asked])
    assert answers[0] == answers[1]
