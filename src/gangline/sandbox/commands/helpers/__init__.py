"""Programs that run as a process of their own, because only a single-threaded process can enter a user namespace.

They are forks of the `forkserver`, which starts once with `python -I -S`, and import nothing outside the standard
library, so that one takes about a millisecond. `spawner` waits inside a sandbox and forks each `supervisor`, which ends
a command with all its children; a fork of that one waits to become the next `command`. The others enter namespaces for
one act. Start with `spawner`.
"""
