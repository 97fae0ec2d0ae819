"""Sandboxes: where a harness runs. `sandbox` (bubblewrap), `apptainer`, `docker`, `podman` isolate; `process` does not.

Each of the four has a folder with a `runtime`. This folder has `process` and `namespaced`, the base of the isolating
runtimes. `harbor/` has another system's environments, isolated as that system does it. `commands/` runs a command,
`confinement/` limits it, `network/` connects it, `shared/` has the host's side, `keeping/` lets sandboxes outlive the
node, and `images/` builds the images of containers. Start with `process`, the smallest runtime, then `namespaced`.
"""
