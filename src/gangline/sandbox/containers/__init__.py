"""The runtimes `docker` and `podman`.

`runtime` starts a container, `engine` has the command lines of both programs, and `life` follows the container's
first process. `services` starts its side containers. Start with `runtime`.
"""
