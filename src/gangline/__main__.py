"""The `gangline` command, and `python -m gangline`."""

import _signal  # pyright: ignore[reportMissingImports] - `signal` imports `enum`: a Ctrl-C meanwhile would show a traceback
import gc
import sys


def main() -> None:
    """Run the command. Until it is loaded there is nothing to clean up, and an extension module that is being loaded
    may swallow a KeyboardInterrupt: a Ctrl-C then just ends the process. Once the command has ended, one comes too
    late: Python's own shutdown would answer it with a traceback."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    gc.disable()  # what is imported stays, and would be looked through for garbage again and again
    from gangline.cli.main import load  # noqa: PLC0415 - after the line above

    run = load(sys.argv[1:])
    gc.freeze()
    gc.enable()
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        run()
    finally:
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        gc.freeze()  # Python's shutdown would look through all of it for garbage once more: a tenth of a short command


if __name__ == "__main__":
    main()
