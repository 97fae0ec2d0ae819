"""Programs that run as a process of their own, because only a single-threaded process can enter a user namespace.

They start with `python -I -S` and import nothing outside the standard library, so that a start takes about 10 ms.
`supervisor` starts a command and ends it with all its children; the others enter namespaces for one act. Start with
`supervisor`.
"""
