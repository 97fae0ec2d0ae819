# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The interpreter's process: runs cells in `__main__`, in an IPython shell if IPython is installed.

Requests and answers are lines of JSON on the socket; stdout and stderr belong to the cells.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import resource
import signal
import socket
import sys
import traceback
import types
from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional

_MAX_TEXT = 1 << 16
"""Maximum characters of a result or traceback."""
_MAX_IMAGES = 8
_MAX_IMAGES_BYTES = 2 << 20
"""Limit for all images of one cell together."""

Answer = Dict[str, Any]


def main(fd: int, program: Dict[str, Any]) -> None:
    """Answer requests until the socket closes."""
    connection = socket.socket(fileno=fd)
    limit = program["options"]["python_memory_bytes"]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("MPLBACKEND", "Agg")
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")
    try:
        cells = IPythonCells(module)
    except ImportError:
        cells = PlainCells(module)
    except Exception:  # an unknown version: the first cell will show it
        traceback.print_exc()
        cells = PlainCells(module)
    own_pid = os.getpid()
    connection.sendall(b'{"ready": true}\n')
    for line in connection.makefile("rb"):
        answer = cells.run(json.loads(line)["code"])
        if os.getpid() != own_pid:  # a cell forked: the copy must not continue as the interpreter
            os._exit(0)
        connection.sendall(json.dumps(answer).encode() + b"\n")


class Cells(ABC):
    """Base of both kinds of interpreter."""

    def __init__(self) -> None:
        self.images: List[bytes] = []

    @abstractmethod
    def execute(self, code: str) -> Answer:
        """Run one cell. Returns `result` and `traceback`, both optional."""

    def run(self, code: str) -> Answer:
        self.images = []
        answer: Answer = {}
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            answer = self.execute(code)
            self._take_figures()
        except KeyboardInterrupt:
            answer = {"traceback": "KeyboardInterrupt\n"}
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _flush()
        fitting: List[bytes] = []
        for image in self.images:
            if len(fitting) < _MAX_IMAGES and sum(map(len, fitting)) + len(image) <= _MAX_IMAGES_BYTES:
                fitting.append(image)
        answer["images"] = [base64.b64encode(image).decode() for image in fitting]
        answer["num_images_omitted"] = len(self.images) - len(fitting)
        for key in ("result", "traceback"):
            if answer.get(key) is not None:
                answer[key] = _shortened(answer[key])
        return answer

    def _take_figures(self) -> None:
        """Collect open figures, as a notebook does."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        try:
            for number in pyplot.get_fignums():
                file = io.BytesIO()
                pyplot.figure(number).savefig(file, format="png", bbox_inches="tight")
                self.images.append(file.getvalue())
        finally:
            pyplot.close("all")


class PlainCells(Cells):
    """Cells without IPython. The value of the last expression is the result, and `_`."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        self._names = module.__dict__
        self._num_cells = 0

    def execute(self, code: str) -> Answer:
        self._num_cells += 1
        name = f"<cell {self._num_cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            value = self._evaluated(code, name)
            if value is None:
                return {}
            self._names["_"] = value
            image = _png(value)
            if image is not None:
                self.images.append(image)
            return {"result": repr(value)}
        except BaseException as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != name:
                frames = frames.tb_next
            return {"traceback": "".join(traceback.format_exception(type(error), error, frames))}

    def _evaluated(self, code: str, name: str) -> Any:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if last is None:
            return None
        return eval(compile(ast.Expression(last.value), name, "eval"), self._names)


class IPythonCells(Cells):
    """Cells in an IPython shell, with its magics, `await` and formatters."""

    def __init__(self, module: types.ModuleType) -> None:
        """Raises: ImportError if IPython is not installed."""
        super().__init__()
        from IPython.core.displayhook import DisplayHook
        from IPython.core.displaypub import DisplayPublisher
        from IPython.core.interactiveshell import InteractiveShell

        answer: Answer = {}
        self._answer = answer
        cells = self

        class Hook(DisplayHook):
            def __call__(self, result: Any = None) -> None:
                self.check_for_underscore()
                if result is None or self.quiet():
                    return
                formats, _ = self.compute_format_data(result)
                self.update_user_ns(result)
                cells._take(formats)

        class Publisher(DisplayPublisher):
            def publish(self, data: Any, *args: Any, **more: Any) -> None:
                if not cells._take_image(data):
                    print(data.get("text/plain", ""))

        class Shell(InteractiveShell):
            displayhook_class = Hook
            display_pub_class = Publisher

            def init_ipython_dir(self, ipython_dir: Any) -> None:
                """Creates no folder in the agent's HOME."""

            def init_profile_dir(self, profile_dir: Any) -> None:
                """Creates no folder in the agent's HOME."""

            def ask_exit(self) -> None:
                print("A cell does not end the interpreter: restart it.")

            def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
                answer["traceback"] = stb if isinstance(stb, str) else "\n".join(stb)

        Shell.clear_instance()
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        config.InteractiveShell.colors = "NoColor"
        self._shell = Shell.instance(user_module=module, config=config)

    def execute(self, code: str) -> Answer:
        self._answer.clear()
        self._shell.run_cell(code, store_history=True)
        return dict(self._answer)

    def _take(self, formats: Any) -> None:
        self._take_image(formats)
        self._answer["result"] = formats.get("text/plain", "")

    def _take_image(self, formats: Any) -> bool:
        image = formats.get("image/png")
        if isinstance(image, str):
            image = base64.b64decode(image)
        if isinstance(image, bytes):
            self.images.append(image)
        return isinstance(image, bytes)


def _png(value: Any) -> Optional[bytes]:
    """A value's own image, obtained as notebooks do."""
    draw = getattr(type(value), "_repr_png_", None)
    image = draw(value) if draw is not None else None
    return image if isinstance(image, bytes) else None


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters omitted]\n{text[-half:]}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a cell may have replaced or closed it
            stream.flush()
