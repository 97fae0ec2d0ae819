"""The `gangline` command, and `python -m gangline`."""

import gc
import signal

__all__ = ["main"]


def main() -> None:
    """Until the commands are loaded there is nothing to clean up: a Ctrl-C then just ends the process. Once a command
    has ended, one comes too late: Python's own shutdown would answer it with a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gangline.cli.main import main as run  # noqa: PLC0415 - after the line above

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # Python's shutdown would look through all of it for garbage once more: a tenth of a short command


if __name__ == "__main__":
    main()
