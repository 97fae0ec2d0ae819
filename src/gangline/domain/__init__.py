"""The nouns of Gangline: ids, frozen records, lifecycle tables, errors, contracts. No I/O, no clock.

Every other package imports this one; it imports none. Start with `task`, `completion` and `trajectory`; the
Protocols of plug-ins are in `contracts`.
"""
