"""The faults of the generated repositories, each in a module with a single purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    module: str
    purpose: str
    names: str
    """Imported by the tests."""
    source: str
    """The module without the fault."""
    repair: str
    """The part of `source` that the fault replaces."""
    fault: str
    wrong: str
    """A repair that looks right but leaves a test failing."""
    issue: str
    """`PACKAGE` stands for the package's name."""
    fails: dict[str, str]
    """Name -> statement of a test that fails before the repair."""
    passes: dict[str, str]


FAULTS = (
    Fault(
        module="pages",
        purpose="Pages of long lists.",
        names="num_pages, page",
        source='''"""Pages of a list."""


def num_pages(num_items, size):
    """How many pages of `size` items are needed."""
    return -(-num_items // size)


def page(items, number, size):
    """The items of page `number`, counted from 1."""
    return items[(number - 1) * size : number * size]
''',
        repair="-(-num_items // size)",
        fault="num_items // size",
        wrong="num_items // size + 1",
        issue="The last page is lost\n\n`PACKAGE.pages.num_pages(11, 5)` returns 2, but eleven items need three "
        "pages of "
        "five.",
        fails={"a_part_of_a_page_counts": "self.assertEqual(num_pages(11, 5), 3)"},
        passes={
            "whole_pages": "self.assertEqual(num_pages(10, 5), 2)",
            "no_items": "self.assertEqual(num_pages(0, 5), 0)",
            "a_page": "self.assertEqual(page([1, 2, 3], 2, 2), [3])",
        },
    ),
    Fault(
        module="spans",
        purpose="Spans of time.",
        names="parse, show",
        source='''"""Spans of time as text, such as 1h30m."""

import re

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse(text):
    """Seconds of a span."""
    if not re.fullmatch(r"(\\d+[dhms])+", text):
        raise ValueError(f"{text!r} is not a span of time")
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\\d+)([dhms])", text))


def show(seconds):
    """A span with the largest units first."""
    parts = []
    for unit, length in UNITS.items():
        number, seconds = divmod(seconds, length)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
''',
        repair='"".join(parts) or "0s"',
        fault='"".join(parts)',
        wrong='"".join(parts) + "0s"',
        issue="An empty text for no time\n\n`PACKAGE.spans.show(0)` returns an empty text, which `parse` refuses. It "
        "should return `0s`.",
        fails={
            "no_time_has_a_text": 'self.assertEqual(show(0), "0s")',
            "no_time_comes_back": "self.assertEqual(parse(show(0)), 0)",
        },
        passes={
            "an_hour_and_a_half": 'self.assertEqual(show(5400), "1h30m")',
            "it_is_parsed": 'self.assertEqual(parse("1d2s"), 86402)',
        },
    ),
    Fault(
        module="settings",
        purpose="Settings of several files.",
        names="merged",
        source='''"""Settings that several files give together."""


def merged(base, changes):
    """`base` with `changes` over it, at every depth. Neither is changed."""
    result = dict(base)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(name), dict):
            value = merged(result[name], value)
        result[name] = value
    return result
''',
        repair="result = dict(base)",
        fault="result = base",
        wrong="result = dict(changes)",
        issue="Defaults change after the first use\n\nAfter `merged(DEFAULTS, user)` of `PACKAGE.settings` the "
        "defaults "
        "have the user's values in them, and the next user gets them too.",
        fails={
            "the_base_stays": 'base = {"a": 1}; merged(base, {"a": 2}); self.assertEqual(base, {"a": 1})',
            "so_does_its_inside": 'base = {"a": {"b": 1}}; merged(base, {"a": {"b": 2}}); '
            'self.assertEqual(base, {"a": {"b": 1}})',
        },
        passes={
            "both_are_in_it": 'self.assertEqual(merged({"a": {"b": 1}}, {"a": {"c": 2}}), {"a": {"b": 1, "c": 2}})'
        },
    ),
    Fault(
        module="words",
        purpose="Words of a text.",
        names="most_common, words",
        source='''"""Words of a text, counted."""

import re
from collections import Counter


def words(text):
    """The words of a text, in small letters."""
    return re.findall(r"\\w+", text.lower())


def most_common(text, number):
    """The most common words; those that are as common in order of the alphabet."""
    counts = Counter(words(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:number]
''',
        repair="(-counts[word], word)",
        fault="-counts[word]",
        wrong="(counts[word], word)",
        issue="The order of equally common words changes\n\n`PACKAGE.words.most_common` returns words that are "
        "as common "
        "in the order of the text. The documentation promises the order of the alphabet.",
        fails={"equal_words_are_in_order": 'self.assertEqual(most_common("b a c", 2), ["a", "b"])'},
        passes={
            "the_most_common_is_first": 'self.assertEqual(most_common("a b b", 1), ["b"])',
            "letters_are_small": 'self.assertEqual(words("A b, C"), ["a", "b", "c"])',
        },
    ),
    Fault(
        module="money",
        purpose="Amounts of money.",
        names="shares",
        source='''"""Amounts in cents."""


def shares(cents, people):
    """The amount divided fairly: no share differs by more than a cent, and no cent is lost."""
    each, rest = divmod(cents, people)
    return [each + 1] * rest + [each] * (people - rest)
''',
        repair="[each + 1] * rest + [each] * (people - rest)",
        fault="[each] * people",
        wrong="[each + rest] + [each] * (people - 1)",
        issue="Cents get lost\n\n`PACKAGE.money.shares(100, 3)` returns 33 cents for each of three, which are 99.",
        fails={
            "no_cent_is_lost": "self.assertEqual(sum(shares(100, 3)), 100)",
            "no_share_is_larger_by_more": "self.assertEqual(max(shares(101, 3)) - min(shares(101, 3)), 1)",
        },
        passes={"an_even_division": "self.assertEqual(shares(90, 3), [30, 30, 30])"},
    ),
    Fault(
        module="paths",
        purpose="Paths of a store.",
        names="joined",
        source='''"""Paths inside a store."""


def joined(root, path):
    """`path` below `root`. Raises: ValueError when it leaves it."""
    parts = []
    for part in path.split("/"):
        if part == "..":
            if not parts:
                raise ValueError(f"{path!r} leaves the store")
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join([root.rstrip("/"), *parts])
''',
        repair='if not parts:\n                raise ValueError(f"{path!r} leaves the store")\n            parts.pop()',
        fault="parts = parts[:-1]",
        wrong='raise ValueError(f"{path!r} leaves the store")',
        issue="Paths that leave the store are cut silently\n\n`PACKAGE.paths.joined('/data', '../secret')` returns "
        "`/data/secret`. A path that leaves the store must raise `ValueError`; one that stays inside must not.",
        fails={"a_path_that_leaves_is_refused": 'self.assertRaises(ValueError, joined, "/data", "a/../../b")'},
        passes={
            "a_path_that_comes_back": 'self.assertEqual(joined("/data", "a/../b"), "/data/b")',
            "a_plain_path": 'self.assertEqual(joined("/data/", "./a//b"), "/data/a/b")',
        },
    ),
    Fault(
        module="cache",
        purpose="A small cache.",
        names="Cache",
        source='''"""A cache of bounded size."""


class Cache:
    """Keeps the entries that were used last."""

    def __init__(self, size):
        self._size = size
        self._entries = {}

    def get(self, name, otherwise=None):
        if name not in self._entries:
            return otherwise
        value = self._entries.pop(name)
        self._entries[name] = value
        return value

    def put(self, name, value):
        self._entries.pop(name, None)
        self._entries[name] = value
        if len(self._entries) > self._size:
            del self._entries[next(iter(self._entries))]
''',
        repair="value = self._entries.pop(name)\n        self._entries[name] = value\n        return value",
        fault="return self._entries[name]",
        wrong="return self._entries.pop(name)",
        issue="The cache drops entries in use\n\n`PACKAGE.cache.Cache` drops the entry that was put first, even "
        "when it is "
        "read all the time. It should drop the one that was not used for longest.",
        fails={
            "a_read_entry_stays": 'cache = Cache(2); cache.put("a", 1); cache.put("b", 2); cache.get("a"); '
            'cache.put("c", 3); self.assertEqual((cache.get("a"), cache.get("b")), (1, None))'
        },
        passes={
            "an_entry_is_read_twice": 'cache = Cache(2); cache.put("a", 1); cache.get("a"); '
            'self.assertEqual(cache.get("a"), 1)',
            "it_is_bounded": 'cache = Cache(1); cache.put("a", 1); cache.put("b", 2); '
            'self.assertIsNone(cache.get("a"))',
        },
    ),
    Fault(
        module="matrix",
        purpose="Small matrices.",
        names="zeros, transposed",
        source='''"""Matrices as lists of rows."""


def zeros(num_rows, num_columns):
    """A matrix of zeros."""
    return [[0] * num_columns for _ in range(num_rows)]


def transposed(rows):
    """Rows become columns."""
    return [list(column) for column in zip(*rows)]
''',
        repair="[[0] * num_columns for _ in range(num_rows)]",
        fault="[[0] * num_columns] * num_rows",
        wrong="[[0] * num_rows for _ in range(num_columns)]",
        issue="Setting one cell sets a column\n\nAfter `m = zeros(2, 3)` of `PACKAGE.matrix` and `m[0][0] = 1`, "
        "`m[1][0]` is 1 too.",
        fails={"rows_are_apart": "rows = zeros(2, 3); rows[0][0] = 1; self.assertEqual(rows, [[1, 0, 0], [0, 0, 0]])"},
        passes={"it_is_transposed": "self.assertEqual(transposed([[1, 2]]), [[1], [2]])"},
    ),
    Fault(
        module="table",
        purpose="Tables as text.",
        names="parse_line",
        source='''"""Lines of comma-separated values."""


def parse_line(line):
    """The fields of a line; commas in double quotes belong to a field."""
    fields, quoted = [""], False
    for char in line.rstrip("\\n"):
        if char == '"':
            quoted = not quoted
        elif char == "," and not quoted:
            fields.append("")
        else:
            fields[-1] += char
    return fields
''',
        repair='char == "," and not quoted',
        fault='char == ","',
        wrong='char == "," and quoted',
        issue="Quoted commas split fields\n\n`PACKAGE.table.parse_line('a,\"b,c\"')` returns three fields. The "
        "comma in "
        "quotes belongs to the second.",
        fails={"a_quoted_comma": """self.assertEqual(parse_line('a,"b,c"'), ["a", "b,c"])"""},
        passes={
            "plain_fields": 'self.assertEqual(parse_line("a,b\\n"), ["a", "b"])',
            "an_empty_field": 'self.assertEqual(parse_line("a,,b"), ["a", "", "b"])',
        },
    ),
    Fault(
        module="retry",
        purpose="Calls that are tried again.",
        names="retried",
        source='''"""Calls that may fail for a moment."""


def retried(call, times, errors=(OSError,)):
    """The result of `call`, tried at most `times`. Raises: the last error."""
    for left in range(times - 1, -1, -1):
        try:
            return call()
        except errors:
            if left == 0:
                raise
    raise ValueError("times must be positive")
''',
        repair="except errors:\n            if left == 0:\n                raise",
        fault="except errors:\n            pass",
        wrong="except errors:\n            raise",
        issue="The error is lost\n\nWhen every try of `PACKAGE.retry.retried` fails, it raises `ValueError: "
        "times must be "
        "positive` in place of the last error.",
        fails={"the_last_error_is_raised": 'self.assertRaises(OSError, retried, lambda: open("/no/such/file"), 2)'},
        passes={
            "it_is_tried_again": "tries = iter([OSError, 7]); "
            "self.assertEqual(retried(lambda: open('/no/such') if next(tries) is OSError else 7, 2), 7)",
            "no_try_is_refused": "self.assertRaises(ValueError, retried, int, 0)",
        },
    ),
)
