"""Integration with verifiers: runs its tasks' hooks and rewards on our sessions. `tasks` converts tasksets and builds
commands for a Python with verifiers; `in_sandbox/` has the modules for that Python, which do not import Gangline.

Start with `tasks`.
"""
