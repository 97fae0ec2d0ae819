"""How an instruction reaches programs that are built on Gemini CLI."""

from __future__ import annotations

from gangline.agents.harnesses.shared.environment import fits_argument

__all__ = ["prompt_argument"]


def prompt_argument(instruction: str) -> tuple[list[str], bytes | None]:
    """Arguments, and the standard input beside them: one of both holds the instruction.

    The programs wait half a second for their standard input and then go on without it, so that on a busy machine the
    instruction may be lost there. As an argument it cannot be, but a long one fits none, and their command line parser
    takes quotation marks off a text that stands between two.
    """
    is_quoted = instruction[:1] in ("'", '"') and instruction[-1:] == instruction[:1]
    if is_quoted or not fits_argument(f"--prompt={instruction}"):
        return [], instruction.encode()
    return [f"--prompt={instruction}"], None
