"""Programs that run in separate processes, since only a single-threaded process can enter a user namespace.

They are forks of the `forkserver`, which starts once with `python -I -S`, and import only the standard library, so a
fork takes about a millisecond. `spawner` waits inside a sandbox and forks each `supervisor`, which runs a command and
kills its children; a fork of the supervisor waits to become the next `command`. The others enter namespaces for a
single action. Start with `spawner`.
"""
