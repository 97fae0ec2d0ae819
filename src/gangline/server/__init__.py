"""The rollout server: takes tasks, leases their sessions to nodes, keeps results, calls back.

`service/` is the core, without HTTP; `routes/` and `compat/` are a thin skin over it; `app` and `run` put it together.

Laws
- The database is the truth; memory holds only who is waiting for what. `kill -9` loses and doubles nothing.
- A result is stored before it is announced; polling, long-polling, callbacks and events tell the same story.

Start with `service/core`.
"""
