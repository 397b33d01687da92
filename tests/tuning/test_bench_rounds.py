"""Interleaved rounds: what is compared is timed under the same conditions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from layerzero.bench.rounds import difference, interleaved


def order_of(names: str, rounds: int) -> list[str]:
    """Which call came when, warm-up left out."""
    came: list[str] = []
    times = interleaved({name: lambda name=name: came.append(name) for name in names}, rounds=rounds, count=1)
    assert {name: len(by_round) for name, by_round in times.items()} == dict.fromkeys(names, rounds)
    return came[len(names) :]


@pytest.mark.parametrize("names", ["ab", "abcdef"])
def test_everybody_follows_everybody_else_about_as_often(names: str) -> None:
    rounds = 600
    came = order_of(names, rounds)
    for i in range(rounds):
        assert sorted(came[i * len(names) : (i + 1) * len(names)]) == list(names)
    follows = Counter(itertools.pairwise(came))
    expected = rounds / len(names)
    for a, b in itertools.permutations(names, 2):
        assert 0.6 * expected < follows[a, b] < 2 * expected, (a, b, follows)


def test_the_order_is_the_same_in_every_run() -> None:
    assert order_of("abc", 20) == order_of("abc", 20)


def test_a_difference_is_taken_within_a_round() -> None:
    # The machine is three times as slow in the last two rounds; the difference of medians would be 10.
    times = {"a": [2.0, 2.5, 12.0, 7.0, 7.0], "b": [1.0, 1.0, 2.0, 6.5, 6.0]}
    assert difference(times, "a", "b") == 1.0
