"""What the operator forbids stays forbidden for texts: at every level of degradation, and when LayerZero is disabled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import small_tokenizers as small
from levels import LEVELS, degrade, right

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

ENCODE = "tokenize.encode"
FORBIDDEN: dict[str, dict[str, Any]] = {
    "deny": {"deny": "tokenizers.*"},
    "deny_sources": {"deny_sources": ["tokenizers"]},
    "filter": {"filter": "priority > 1000"},
    "lock": {"lock": "tiktoken.encode"},
}


@pytest.fixture(autouse=True)
def words() -> Iterator[None]:
    """A tokenizer only its own library can serve."""
    lz.register_tokenizer("words", small.word_level())
    yield
    lz.reset()


def at(level: str, served: bool) -> None:
    """Brings the process to a level; with a call before it the library has proved itself and was decided for."""
    degrade(level, min_calls=50)
    if served:
        assert lz.tokenize("hello", "words") == {"input_ids": [1]}
    # One call on texts that is well is not enough to change the level.
    for _ in range(50 - served):
        right()
    assert lz.health().level == level


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_else_keeps_its_own_library_from_serving(level: str, served: bool) -> None:
    at(level, served)
    assert lz.tokenize("hello", "words") == {"input_ids": [1]}
    with lz.disabled():
        assert lz.tokenize("hello", "words") == {"input_ids": [1]}


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("how", FORBIDDEN)
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_forbidden_does_not_serve(level: str, served: bool, how: str) -> None:
    at(level, served)
    lz.configure(rules=[{"name": "forbidden", "operation": ENCODE, **FORBIDDEN[how]}])
    assert lz.health().level == level
    assert lz.explain("tokenize", "hello", "words").chosen is None
    for ask in (lz.tokenize, lambda *call: lz.which("tokenize", *call)):
        with pytest.raises(lz.NoKernelFoundError):
            ask("hello", "words")
    with lz.disabled():
        if how == "lock":
            # Switched off means off: nothing is locked then.
            assert lz.tokenize("hello", "words") == {"input_ids": [1]}
        else:
            with pytest.raises(lz.NoKernelFoundError, match="forbidden"):
                lz.tokenize("hello", "words")
    lz.configure(rules=None)
    assert lz.tokenize("hello", "words") == {"input_ids": [1]}


@pytest.mark.parametrize("name", ["LayerZero is disabled: only references run", "degraded to 'reduced': no"])
def test_a_rule_is_not_known_by_its_name(name: str) -> None:
    lz.configure(rules=[{"name": name, "operation": ENCODE, "deny_sources": ["tokenizers"]}])
    with lz.disabled(), pytest.raises(lz.NoKernelFoundError):
        lz.tokenize("hello", "words")
