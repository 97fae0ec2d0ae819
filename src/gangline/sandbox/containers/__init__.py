"""The runtimes `docker` and `podman`.

`runtime` starts a container, `engine` has the command lines of both programs, and `life` follows the container's
first process. `services` starts the containers alongside it. Start with `runtime`.
"""
