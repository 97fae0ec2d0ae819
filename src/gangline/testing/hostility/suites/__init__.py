"""The attacks, by subject.

Each module lists its attacks in `ATTACKS`; `gangline.testing.hostility` collects them. Start with `privileges`.
"""
