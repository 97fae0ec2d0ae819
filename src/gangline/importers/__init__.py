"""Tasks from the field as our own: Harbor task folders, Terminal-Bench folders, SWE-bench rows.

An importer turns what others wrote into the body of an ordinary task: nothing of a node knows where a task came from.
What it cannot carry it refuses by name (`InvalidRequest`), or says in a note; nothing is dropped silently. It reads
files of the machine that submits, and starts nothing. Start with `harbor`.
"""
