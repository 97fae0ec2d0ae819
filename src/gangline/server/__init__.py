"""The rollout server: takes tasks, leases their sessions to nodes, keeps results, calls back.

Laws
- The database is the truth; memory holds only who is waiting for what. `kill -9` loses and doubles nothing.
- `server/service/core.py` is the core, without HTTP; routes are a thin skin over it.
- A result is stored before it is announced; polling, long-polling, callbacks and events tell the same story.
"""
