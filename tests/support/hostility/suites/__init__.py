"""The attacks, by subject.

Each module lists its attacks in `ATTACKS`; `support.hostility` collects them. Start with `privileges`.
"""
