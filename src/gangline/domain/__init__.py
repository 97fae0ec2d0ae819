"""The core types of Gangline: ids, frozen records, lifecycle tables, errors, contracts. No I/O, no clock.

All other packages import this one; it imports no other. Start with `task`, `completion` and `trajectory`. The Protocols
of plug-ins are in `contracts`.
"""
