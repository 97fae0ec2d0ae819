"""Passes an instruction to programs that are based on Gemini CLI."""

from __future__ import annotations

from gangline.agents.harnesses.shared.environment import fits_argument


def prompt_argument(instruction: str) -> tuple[list[str], bytes | None]:
    """Arguments and standard input, one of which contains the instruction.

    The programs wait half a second for their standard input and then continue without it, so an instruction there may
    be lost on a busy machine. An argument is safe, but has a length limit, and their command line parser removes
    quotation marks around the whole text.
    """
    is_quoted = instruction[:1] in ("'", '"') and instruction[-1:] == instruction[:1]
    if is_quoted or not fits_argument(f"--prompt={instruction}"):
        return [], instruction.encode()
    return [f"--prompt={instruction}"], None
