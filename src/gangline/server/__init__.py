"""The rollout server: accepts tasks, leases their sessions to nodes, stores results, and sends callbacks.

`service/` is the core, without HTTP; `routes/` and `compat/` are a thin layer over it; `app` and `run` compose them.

Laws
- The database is authoritative; memory only holds waiting callers. `kill -9` neither loses nor duplicates anything.
- A result is stored before it is announced; polling, long-polling, callbacks and events agree.

Start with `service/core`.
"""
