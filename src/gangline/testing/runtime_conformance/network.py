"""The hosts that a sandbox reaches under each network policy. A runtime that reports its network as `not enforced` is
not checked.
"""

from __future__ import annotations

import asyncio
import socket

from gangline.testing.runtime_conformance.bench import Bench, Checks, dial, promised, proxies, until_present

CHECKS = Checks()

_SERVE = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "open('port.new', 'w').write(str(s.getsockname()[1])); import os; os.rename('port.new', 'port')\n"
    "while True:\n  c, _ = s.accept(); c.sendall(b'served:' + c.recv(64)); c.close()"
)
"""A server inside, on the sandbox's own loopback."""


@CHECKS.isolation
async def a_sandbox_resolves_its_own_host_name(bench: Bench) -> None:
    """Java, Spark, MPI and Erlang do this on start."""
    program = "import socket; print(socket.gethostbyname(socket.gethostname()), socket.gethostbyname('localhost'))"
    for network in ("none", "proxy"):
        sandbox = await bench.start(network=network)
        result = await sandbox.exec(["python3", "-c", program])
        assert result.stdout == b"127.0.0.1 127.0.0.1\n", result


@CHECKS.add
async def the_proxy_is_reached_and_streams(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec(dial(sandbox.proxy_url))).stdout == b"proxy:hello\n"
    assert sandbox.proxy_url is not None
    host, _, port = sandbox.proxy_url.removeprefix("http://").rpartition(":")
    program = (
        f"import socket; s = socket.create_connection(({host!r}, {port})); f = s.makefile('rwb')\n"
        "for n in range(200):\n  f.write(b'%d ' % n + b'x' * 20000 + b'\\n'); f.flush()\n"
        "  assert f.readline().startswith(b'proxy:%d ' % n)\n"
        "s.shutdown(socket.SHUT_WR); assert f.read() == b''; print('streamed')"
    )
    result = await sandbox.exec(["python3", "-c", program])
    assert result.stdout == b"streamed\n", result


@CHECKS.add
async def the_proxy_is_reached_many_times_at_once(bench: Bench) -> None:
    sandbox = await bench.start()
    assert sandbox.proxy_url is not None
    host, _, port = sandbox.proxy_url.removeprefix("http://").rpartition(":")
    program = (
        f"import socket; all = [socket.create_connection(({host!r}, {port})) for n in range(40)]\n"
        "for n, s in enumerate(all): s.sendall(b'%d\\n' % n)\n"
        "assert [s.makefile().readline() for s in all] == [f'proxy:{n}\\n' for n in range(40)]; print('all')"
    )
    result = await sandbox.exec(["python3", "-c", program])
    assert result.stdout == b"all\n", result


@CHECKS.add
async def the_proxy_is_reached_under_full(bench: Bench) -> None:
    sandbox = await bench.start(network="full")
    assert (await sandbox.exec(dial(sandbox.proxy_url))).stdout == b"proxy:hello\n"


@CHECKS.add
async def commands_meet_on_the_sandboxes_own_loopback(bench: Bench) -> None:
    """An agent starts a server and tests it."""
    sandbox = await bench.start()
    await sandbox.upload("serve.py", _SERVE.encode())
    await sandbox.exec("setsid python3 serve.py > /dev/null 2>&1 < /dev/null &")
    await until_present(sandbox, "port")
    port = int(await sandbox.download("port"))
    assert (await sandbox.exec(dial(port))).stdout == b"served:hello\n"


@CHECKS.isolation
async def one_sandbox_does_not_reach_another(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.start(), bench.start())
    promised(one, "network")
    await one.upload("serve.py", _SERVE.encode())
    await one.exec("setsid python3 serve.py > /dev/null 2>&1 < /dev/null &")
    await until_present(one, "port")
    assert not (await two.exec(dial(int(await one.download("port"))))).ok


@CHECKS.isolation
async def under_proxy_nothing_else_is_reachable(bench: Bench) -> None:
    async with proxies() as other:
        sandbox = await bench.start()
        promised(sandbox, "network")
        assert not (await sandbox.exec(dial(other.port))).ok, "a service on the host's loopback was reached"
    for host in ("1.1.1.1", "10.0.0.1"):
        result = await sandbox.exec(dial(80, host=host))
        assert b"unreachable" in result.stderr, f"the outside must be unreachable at once: {result}"


@CHECKS.isolation
async def abstract_sockets_of_the_host_are_not_reached(bench: Bench) -> None:
    """They have no file and thus no permissions: only a separate network isolates a sandbox from them."""
    name = f"gangline-{bench.owner}"
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(f"\0{name}")
        service.listen()
        sandbox = await bench.start()
        promised(sandbox, "network")
        program = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        result = await sandbox.exec(["python3", "-c", program])
        assert b"ConnectionRefusedError" in result.stderr, result


@CHECKS.isolation
async def under_none_there_is_no_proxy(bench: Bench) -> None:
    sandbox = await bench.start(network="none")
    promised(sandbox, "network")
    assert sandbox.proxy_url is None
    assert not (await sandbox.exec(dial(bench.proxy.port))).ok
