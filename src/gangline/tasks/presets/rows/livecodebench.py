"""Columns of LiveCodeBench: `public_test_cases`, `private_test_cases` and `metadata`, which may name a function.

Private tests are JSON, or JSON in a pickled text, compressed, in base 64. Programs get the imports that the benchmark's
own runner gives them, and outputs are compared as it compares them.

Source: LiveCodeBench 28fef95, `benchmarks/code_generation.py` and `evaluation/testing_util.py`.
"""

from __future__ import annotations

import base64
import io
import json
import pickletools
import re
import warnings
import zlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import InvalidRequest

PRIVATE = "private_test_cases"
_MAX_BYTES = 256 << 20
_UNREADABLE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError),
    zlib.error,
)
_TEXT_ALONE = re.compile(
    r"(PROTO )?(FRAME )?(UNICODE|SHORT_BINUNICODE|BINUNICODE8?) ((PUT|BINPUT|LONG_BINPUT|MEMOIZE) )?STOP "
)
"""Opcodes of a pickled text, of every protocol."""
_MAX_OPS = 8
_CASE_S, _ALL_S = 6, 540
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_PRELUDE = "".join(
    [
        *(f"from {name} import *\n" for name in _STARRED),
        *(f"import {name}\n" for name in _STARRED if name not in ("builtins", "typing")),
        "sys.setrecursionlimit(50000)\n",
    ]
)
_BUILD = f"""
text = open("solution.py", "rb").read().removeprefix(b"\\xef\\xbb\\xbf")
open("solution.py", "wb").write(text if b"__future__" in text else {_PRELUDE.encode()!r} + text)
"""


class LiveCodeBenchRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    question_content: str = Field(min_length=1)
    starter_code: str = ""
    public_test_cases: str = "[]"
    private_test_cases: str
    metadata: str = "{}"

    def problem(self) -> str:
        start = self.starter_code.strip()
        return self.question_content.strip() + (f"\n\nStart with:\n\n```python\n{start}\n```" if start else "")

    def tests(self) -> dict[str, Any]:
        """`inputs`, `outputs` and `fn_name`. Raises: InvalidRequest."""
        try:
            found = [*_read("public_test_cases", self.public_test_cases), *_read(PRIVATE, self.private_test_cases)]
            name = json.loads(self.metadata or "{}").get("func_name")
            return {f"{part}s": [test[part] for test in found] for part in ("input", "output")} | {"fn_name": name}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"metadata or test cases: are not those of LiveCodeBench: {error!r}") from error


def livecodebench_evaluator(cases: list[dict[str, Any]], function: str | None) -> dict[str, Any]:
    config = {
        "cases": cases,
        "function": function,
        "compare": "lines",
        "build": ["python3", "-c", _BUILD],
        "case_timeout_seconds": _CASE_S,
        "timeout_seconds": _ALL_S,
    }
    return {"strategy": "cases", "refresh_runtime": True, "config": config}


def text_of(data: bytes) -> str:
    """The text of a pickle that holds nothing else. Its opcodes are read, and none is run. Raises: ValueError."""
    file = io.BytesIO(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names with wrong escapes
        ops = list(islice(pickletools.genops(file), _MAX_OPS))
    if not _TEXT_ALONE.fullmatch("".join(f"{op.name} " for op, _, _ in ops)) or file.tell() != len(data):
        raise ValueError("the pickle is not one text alone")
    return next(given for _, given, _ in ops if isinstance(given, str))


def _read(column: str, text: str) -> list[Mapping[str, Any]]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        if not unpacker.eof:
            raise InvalidRequest(f"{column}: holds more than {_MAX_BYTES >> 20} MiB, or is cut short")
        return json.loads(text_of(data))
    except _UNREADABLE as error:
        raise InvalidRequest(f"{column}: is neither JSON nor LiveCodeBench's packed JSON: {error}") from error
