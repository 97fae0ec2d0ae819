"""Sandboxes: where a harness runs. `sandbox` (bubblewrap), `docker` and `podman` isolate; `process` does not.

sandbox.py, process.py   the two runtimes: start, reap, and their handles
bubblewrap.py            what a sandbox sees: the command line of `bwrap`
masks.py                 host folders that no sandbox sees
holder.py                the process that keeps a sandbox's namespaces alive
containers.py            `docker` and `podman`: images of containers
container_engine.py      the command lines of both
container_life.py        a container's first process, from its start to its end
execution.py             one command: its supervisor, its bounded output, its end
relay.py                 the node's proxy, brought into a network that has only `lo`
users.py                 numeric users, one for each sandbox that lives
files.py                 bytes in and out of folders that an untrusted program writes
system_calls.py          the filter of system calls that every command runs under
seccomp.py               the filter that an engine gave to its container, read out of it
threads.py               blocking work that ends before its caller does
limits.py, cgroups.py    what a sandbox may use, and how that is enforced
keeper.py, kept.py       the process that keeps sandboxes over a death of the node, and the node's side of it
keeper_link.py, keeper_wire.py  the connection between the two, and what is said on it
disk.py                  how much of the disk a sandbox takes, and its end when that is too much
leftovers.py             what a crash left: labelled processes, marked folders
helpers/                 programs of ours that run as their own short-lived process
"""
