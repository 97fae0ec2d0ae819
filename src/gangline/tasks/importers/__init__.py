"""Tasks from the field as our own: Harbor task folders, Terminal-Bench folders, SWE-bench rows.

An importer turns other systems' tasks into the body of an ordinary task: nothing of a node knows where a task came
from. Content that it cannot carry is rejected by name (`InvalidRequest`), or reported in a note; nothing is dropped
silently. It reads files of the machine that submits, and starts nothing. Start with `harbor/`.
"""
