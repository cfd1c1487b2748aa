"""Word patterns as Hugging Face's tokenizer.json files write them (Oniguruma), made into patterns of Python's `re`.

`re` has no classes by Unicode's general category, so `\\p{L}` becomes its ranges of code points. They are computed from `unicodedata`, or
handed in, so that a saved tokenizer keeps the Unicode that it was read with. `\\s` is Unicode's White_Space, as in Oniguruma: `re` counts
four control characters more.

What is read: literals, escapes, classes with ranges, categories and `\\s`, `\\S`, `\\d`, groups, `(?i:` of ASCII letters, lookahead, and
greedy quantifiers. A repeated group may be optional but not repeat, so no pattern takes exponential time. All else is refused by name.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache

from alpha.errors import InputError

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each run, in order and disjoint."""

MOST_PATTERN = 4096
"""Characters of a pattern."""

WHITE_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                       (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
"""Unicode's property White_Space (PropList.txt), unchanged since Unicode 6.3."""

_CATEGORY = re.compile(r"\{(\^?)(L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?)\}")
_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_SIGNS = frozenset("\\|()[]{}?*+.^$/-'\"!#%&,:;<=>@_`~ ")
_FOLDS = {"s": "ſ", "k": "\u212a"}
"""ASCII letter -> the other character that folds to it (CaseFolding.txt)."""
_TWINS = re.compile("ss|st|f[fil]")
"""Letters for which one character stands when case is ignored (ß, ﬆ, ﬀ): such a pattern is refused."""


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All code points of `ranges`, which may overlap in any order."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges) -> Ranges:
    """The other code points."""
    starts = [0, *(high + 1 for _, high in ranges)]
    ends = [*(low - 1 for low, _ in ranges), sys.maxunicode]
    return tuple((low, high) for low, high in zip(starts, ends) if low <= high)


@cache
def categories() -> Mapping[str, Ranges]:
    """General category, or its first letter -> code points, by the Unicode of this Python (`unicodedata.unidata_version`)."""
    runs: dict[str, list[tuple[int, int]]] = {}
    start, before = 0, unicodedata.category("\0")
    for point in range(1, sys.maxunicode + 2):
        now = unicodedata.category(chr(point)) if point <= sys.maxunicode else ""
        if now != before:
            for name in (before, before[0]):
                runs.setdefault(name, []).append((start, point - 1))
            start, before = point, now
    return {name: union(found) for name, found in runs.items()}


class _Reader:
    """Recursive descent over one pattern. Each method reads one thing and returns (`re` source, fewest characters it takes)."""

    def __init__(self, pattern: str, classes: Mapping[str, Ranges]) -> None:
        self.text, self.at, self.classes = pattern, 0, classes
        self.used: dict[str, Ranges] = {}

    def refuse(self, what: str) -> InputError:
        return InputError("the word pattern of a tokenizer is not supported", came=f"{what} at character {self.at} of {self.text[:200]!r}",
                          expected="literals, classes, \\p{category}, \\s, \\S, \\d, groups, lookahead, greedy quantifiers",
                          do="take a tokenizer with the words of GPT-2, Llama 3 or Qwen")

    def take(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def next(self) -> str:
        if self.at >= len(self.text):
            raise self.refuse("an end too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self, folded: bool) -> tuple[str, int]:
        """Up to the end of the group or the pattern."""
        found = [self.sequence(folded)]
        while self.take("|"):
            found.append(self.sequence(folded))
        return "|".join(source for source, _ in found), min(fewest for _, fewest in found)

    def sequence(self, folded: bool) -> tuple[str, int]:
        out, width, start = [], 0, self.at
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            source, fewest = self.atom(folded)
            least, quantifier = self.quantifier()
            if quantifier and (source.startswith("(?!") or source.startswith("(?=")):
                raise self.refuse("a repeated lookahead")
            if quantifier not in ("", "?") and source.startswith("("):
                raise self.refuse("a repeated group")
            out.append(source + quantifier)
            width += fewest * least
        if folded and _TWINS.search(self.text[start : self.at].lower()):
            raise self.refuse("letters that one character folds to")
        return "".join(out), width

    def quantifier(self) -> tuple[int, str]:
        """(fewest times, source); nothing is once."""
        found = re.compile(r"[?*+]|\{(\d{1,4})(?:,(\d{0,4}))?\}").match(self.text, self.at)
        if not found:
            return 1, ""
        self.at = found.end()
        if self.text[self.at : self.at + 1] in tuple("?*+{"):
            raise self.refuse("a lazy, possessive or second quantifier")
        if found[1] and found[2] and int(found[1]) > int(found[2]):
            raise self.refuse("a quantifier with its ends swapped")
        return {"?": 0, "*": 0, "+": 1}.get(found[0], int(found[1] or 0)), found[0]

    def atom(self, folded: bool) -> tuple[str, int]:
        if self.take("("):
            kind = next((k for k in ("?:", "?i:", "?!", "?=") if self.take(k)), "")
            if not kind and self.text[self.at : self.at + 1] in ("?", "*"):
                raise self.refuse("an unknown kind of group")
            source, fewest = self.alternatives(folded or kind == "?i:")
            if not self.take(")"):
                raise self.refuse("an open group")
            look = kind in ("?!", "?=")
            return f"({kind if look else '?:'}{source})", 0 if look else fewest
        if self.take("["):
            ranges = self.in_class()
        else:
            ranges = self.single()
        if folded:
            if len(ranges) != 1 or ranges[0][0] != ranges[0][1] or ranges[0][0] > 127:
                raise self.refuse("more than ASCII letters where case is ignored")
            letter = chr(ranges[0][0]).lower()
            if letter.isalpha():
                ranges = union([(ord(c), ord(c)) for c in (letter, letter.upper(), _FOLDS.get(letter, letter))])
        return _class(ranges), 1

    def in_class(self) -> Ranges:
        """The rest of a class, its `[` read."""
        negated = self.take("^")
        found: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.text[self.at : self.at + 1] == "[" or self.text.startswith("&&", self.at):
                raise self.refuse("a class in a class")
            low = self.escape() if self.take("\\") else self.literal(self.next())
            if self.at + 1 < len(self.text) and self.text[self.at] == "-" and self.text[self.at + 1] != "]":
                self.at += 1
                high = self.escape() if self.take("\\") else self.literal(self.next())
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1] or low[0] > high[0]:
                    raise self.refuse("a range without two ends")
                low = ((low[0][0], high[0][0]),)
            found += low
        if not found:
            raise self.refuse("an empty class")
        return complement(union(found)) if negated else union(found)

    def single(self) -> Ranges:
        if self.take("\\"):
            return self.escape()
        character = self.next()
        if character in ".^$*+?{":
            raise self.refuse(repr(character))
        return self.literal(character)

    def literal(self, character: str) -> Ranges:
        return ((ord(character), ord(character)),)

    def escape(self) -> Ranges:
        """What stands behind a backslash."""
        character = self.next()
        if character in "pP":
            found = _CATEGORY.match(self.text, self.at)
            if not found:
                raise self.refuse("a property that is no general category")
            self.at = found.end()
            ranges = self.category(found[2])
            return complement(ranges) if bool(found[1]) != (character == "P") else ranges
        if character in "dD":
            return self.category("Nd") if character == "d" else complement(self.category("Nd"))
        if character in "sS":
            return WHITE_SPACE if character == "s" else complement(WHITE_SPACE)
        if character in _ESCAPES or character in _SIGNS:
            return self.literal(chr(_ESCAPES.get(character, ord(character))))
        raise self.refuse(f"the escape \\{character}")

    def category(self, name: str) -> Ranges:
        if name not in self.classes:
            raise self.refuse(f"the category {name}, which was not saved,")
        self.used[name] = self.classes[name]
        return self.classes[name]


def _class(ranges: Ranges) -> str:
    """`re` source of one character out of `ranges`."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return re.escape(chr(ranges[0][0]))
    other = complement(ranges)
    sign, ranges = ("^", other) if len(other) < len(ranges) else ("", ranges)
    return f"[{sign}{''.join(_escaped(low) + ('-' + _escaped(high) if high > low else '') for low, high in ranges)}]"


def _escaped(point: int) -> str:
    return f"\\U{point:08x}"


def translate(pattern: str, classes: Mapping[str, Ranges] | None = None) -> tuple[re.Pattern[str], dict[str, Ranges]]:
    """(pattern of `re` that finds the same words, the categories that it uses). Runs of text between words are words too.

    `classes`: code points by category (default: this Python's). InputError for what is not supported, and for a pattern that finds nothing.
    """
    reader = _Reader(pattern, categories() if classes is None else classes)
    if len(pattern) > MOST_PATTERN:
        raise reader.refuse(f"{len(pattern)} characters (at most {MOST_PATTERN})")
    source, fewest = reader.alternatives(False)
    if reader.at < len(pattern):
        raise reader.refuse("a bracket that nothing opened")
    if fewest == 0:
        raise reader.refuse("a word of no characters")
    try:
        return re.compile(f"(?:{source})|(?:(?!{source})[\\s\\S])+"), reader.used
    except (re.error, OverflowError, RecursionError) as error:
        raise reader.refuse(f"what Python's re refuses ({error})") from error
