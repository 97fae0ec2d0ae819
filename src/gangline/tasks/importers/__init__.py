"""Imports tasks of other systems: Harbor task folders, Terminal-Bench folders, SWE-bench rows.

An importer converts a task to the body of an ordinary one: nodes do not know where a task came from. Unsupported
content is rejected by name (`InvalidRequest`) or reported in a note; nothing is dropped silently. Importers read files
of the submitting machine, and start no programs. Start with `harbor/`.
"""
