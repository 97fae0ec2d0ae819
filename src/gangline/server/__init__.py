"""The rollout server: takes tasks, leases their sessions to nodes, keeps results, calls back.

`service/` is the core, without HTTP; `routes/` and `compat/` are a thin layer over it; `app` and `run` compose them.

Laws
- The database is the truth; memory holds only the waiting callers. `kill -9` loses and doubles nothing.
- A result is stored before it is announced; polling, long-polling, callbacks and events agree.

Start with `service/core`.
"""
