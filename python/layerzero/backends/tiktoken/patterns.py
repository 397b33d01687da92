"""Patterns that the engines of `tokenizers` (Oniguruma) and tiktoken (fancy-regex) read alike. What is taken is listed
here, anything else is refused: literals, classes, groups, looking ahead, and counts of what is not empty."""

from __future__ import annotations

import re


class Unclear(Exception):
    """What in a pattern may be read differently."""


_CATEGORIES = "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Co"
_SCRIPTS = "Arabic Armenian Bengali Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Tamil Thai"
_PROPERTY = rf"\\[pP]\{{(?:{'|'.join((_CATEGORIES + ' ' + _SCRIPTS).split())})\}}"
_ESCAPE = rf"{_PROPERTY}|\\[sS]|\\[rnt]|\\[-/'\",.:;!?*+()\[\]{{}}|^$\\#@%=]"
_LETTER = r"[^\\.^$&~#\[\](){}|?*+-]"
_INSIDE = rf"{_ESCAPE}|[^\W_]-[^\W_]|[^\\^&~\[\]:-]"
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?(?:{_INSIDE})(?:{_INSIDE}|:)*-?\]|{_LETTER}|[-#]")
_COUNT = re.compile(r"[?*+][?+]?(?![?*+{])|\{(\d{1,3})(,(\d{1,3})?)?\}(?![?*+{])")
#: Without regard to case, no more than this: in others Oniguruma takes one character for several.
_ENDING = r"'?(?:\[[sdmt]+\]|[sdmt]|re|ve|ll)"
_OPENING = re.compile(r"\(\?[:!=]|\((?!\?)")
_ENDINGS = re.compile(rf"\(\?i:({_ENDING}(?:\|{_ENDING})*)\)")


def check(pattern: str) -> None:
    """Raises `Unclear` unless both engines read the pattern alike and whatever it matches has a character."""
    reader = _Reader(pattern)
    least = reader.alternatives()
    if reader.at < len(pattern):
        raise Unclear(f"{pattern[reader.at :]!r:.40}")
    if not least:
        raise Unclear("it can match nothing at all")


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def alternatives(self) -> int:
        """The fewest characters any of them matches."""
        least = self.sequence()
        while self.pattern.startswith("|", self.at):
            self.at += 1
            least = min(least, self.sequence())
        return least

    def sequence(self) -> int:
        least = 0
        while (one := self.item()) is not None:
            least += one
        return least

    def item(self) -> int | None:
        """What matches, and how often; nothing at the end of a sequence."""
        begin = self.at
        least = self.group()
        if least is None and (atom := _ATOM.match(self.pattern, begin)):
            self.at, least = atom.end(), 1
        if least is None or self.at == len(self.pattern) or self.pattern[self.at] not in "?*+{":
            return least
        count = _COUNT.match(self.pattern, self.at)
        # Engines differ in how often they try what is empty.
        if not count or not least or count[3] and not 0 < int(count[1]) <= int(count[3]):
            raise Unclear(f"{self.pattern[begin : self.at + 8]!r:.40}")
        self.at = count.end()
        return least * (int(count[1]) if count[1] else int(count[0][0] == "+"))

    def group(self) -> int | None:
        if ending := _ENDINGS.match(self.pattern, self.at):
            self.at = ending.end()
            return 1
        opened = _OPENING.match(self.pattern, self.at)
        if not opened:
            return None
        self.at = opened.end()
        least = self.alternatives()
        if not self.pattern.startswith(")", self.at):
            raise Unclear(f"{self.pattern[opened.start() :]!r:.40}")
        self.at += 1
        return 0 if opened[0] in ("(?!", "(?=") else least
