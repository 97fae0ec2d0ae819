"""Whatever an instruction holds, a shell command receives it as data."""

import os
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.agents.harnesses.shared.environment import PLACEHOLDERS, fill, shell_text

# A process can be given any text but NUL and lone surrogates.
INSTRUCTIONS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40) | st.text(
    "'\"`$(){};|&<>\\\n #*~!", max_size=20
)


@settings(max_examples=60, deadline=None)
@given(INSTRUCTIONS)
def test_an_instruction_reaches_the_program_unchanged(instruction: str) -> None:
    command = shell_text("""printf "%s\\0" {instruction} "{instruction}" "<{instruction}>" 'it'\\''s' """)
    env = {"PATH": os.defpath, "GANGLINE_INSTRUCTION": instruction}
    output = subprocess.run(["sh", "-c", command], env=env, capture_output=True, check=True).stdout.decode()
    assert output.split("\0")[:-1] == [instruction, instruction, f"<{instruction}>", "it's"]


@given(st.text(), st.text())
def test_filling_replaces_each_placeholder_once(before: str, instruction: str) -> None:
    values = dict.fromkeys(PLACEHOLDERS, "") | {"instruction": instruction}
    plain = before.replace("{", "").replace("$", "")
    assert fill(f"{plain}{{instruction}}", values) == plain + instruction
