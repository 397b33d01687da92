"""`scripts/check_site.py`: a built site with a fault of each kind, and one without."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD = '<title>One</title><article><h1 id="top">One</h1>{}</article>'


def checked(site: Path, body: str) -> tuple[int, str]:
    """The site with this text in one of its two pages, checked."""
    (site / "one.html").write_text(GOOD.format(body))
    (site / "two.html").write_text(GOOD.format('<a href="one.html#top">one</a>'))
    (site / "chart.svg").write_text("<svg/>")
    command = [sys.executable, str(ROOT / "scripts" / "check_site.py"), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_whole_site_passes(tmp_path: Path) -> None:
    body = (
        '<a href="two.html#top">two</a> <a href="#top">up</a> <a href="https://example.com/none">out</a> '
        '<img src="chart.svg" alt="**no**"> <pre><code># a comment\n```\n[a](b)</code></pre> 2 ** 3, a | b'
    )
    assert checked(tmp_path, body) == (0, f"{tmp_path}: 2 pages, every link and anchor leads somewhere\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="three.html">three</a>', "one.html: href='three.html' leads nowhere"),
        ('<a href="two.html#below">two</a>', "one.html: href='two.html#below': no such place on that page"),
        ('<a href="#below">below</a>', "one.html: href='#below': no such place on that page"),
        ('<img src="none.svg">', "one.html: src='none.svg' leads nowhere"),
        ("<p>see [this](two.md)</p>", "one.html: Markdown that was not rendered: '](two.md)'"),
        ("<p>a **bold word** here</p>", "one.html: Markdown that was not rendered: '**bold word**'"),
        ("<p>```python</p>", "one.html: Markdown that was not rendered: '```'"),
        ("<p><code>mermaid\nflowchart TD\na --> b</code></p>", "one.html: Markdown that was not rendered: 'mermaid'"),
        ("<p>a\n| b | c |\n</p>", "one.html: Markdown that was not rendered: '| b | c |'"),
    ],
)
def test_a_fault_is_named_with_its_page(tmp_path: Path, body: str, said: str) -> None:
    assert checked(tmp_path, body) == (1, said + "\n")


def test_a_folder_without_pages_is_a_fault(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_site.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "make docs" in done.stdout
