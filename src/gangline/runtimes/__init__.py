"""Sandboxes: where a harness runs. `sandbox` (bubblewrap), `docker` and `podman` isolate; `process` does not.

runtimes/bubblewrap/runtime.py, process.py   the two runtimes: start, reap, and their handles
runtimes/bubblewrap/command_line.py            what a sandbox sees: the command line of `bwrap`
runtimes/confinement/masks.py                 host folders that no sandbox sees
runtimes/commands/holder.py                the process that keeps a sandbox's namespaces alive
runtimes/containers/runtime.py            `docker` and `podman`: images of containers
runtimes/containers/engine.py      the command lines of both
runtimes/containers/life.py        a container's first process, from its start to its end
runtimes/commands/execution.py             one command: its supervisor, its bounded output, its end
runtimes/network/relay.py                 the node's proxy, brought into a network that has only `lo`
runtimes/shared/users.py                 numeric users, one for each sandbox that lives
runtimes/shared/files.py                 bytes in and out of folders that an untrusted program writes
runtimes/confinement/system_calls.py          the filter of system calls that every command runs under
runtimes/confinement/seccomp.py               the filter that an engine gave to its container, read out of it
runtimes/shared/threads.py               blocking work that ends before its caller does
runtimes/confinement/limits.py, runtimes/confinement/cgroups.py    what a sandbox may use, and how that is enforced
runtimes/keeping/keeper.py, runtimes/keeping/kept.py       the process that keeps sandboxes over a death of the node, and the node's side of it
runtimes/keeping/link.py, runtimes/keeping/wire.py  the connection between the two, and what is said on it
runtimes/shared/disk.py                  how much of the disk a sandbox takes, and its end when that is too much
runtimes/shared/leftovers.py             what a crash left: labelled processes, marked folders
helpers/                 programs of ours that run as their own short-lived process
"""
