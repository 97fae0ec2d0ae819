"""The user `grader`, if a runtime has it: nothing that the agent does can affect it."""

from __future__ import annotations

import asyncio

from gangline.testing.runtime_conformance.bench import Bench, Checks, promised

CHECKS = Checks()


@CHECKS.add
async def a_grader_is_another_user_with_a_home_of_its_own(bench: Bench) -> None:
    sandbox = await bench.start(env={"HOME": "/nowhere"})
    promised(sandbox, "grader_user")
    assert sandbox.grader_home is not None
    agent, grader = [await sandbox.exec("id -u; pwd; echo ~", user=user) for user in ("agent", "grader")]
    agents_uid, *_ = agent.stdout.split()
    uid, where, home = grader.stdout.split()
    assert uid not in (b"0", agents_uid)
    assert (where.decode(), home.decode()) == (sandbox.workdir, sandbox.grader_home)
    none = "0" * 16
    seen = await sandbox.exec(["grep", "-E", "^(CapPrm|CapEff|CapAmb|NoNewPrivs)", "/proc/self/status"], user="grader")
    assert seen.stdout.decode().split()[1::2] == [none, none, none, "1"]
    assert not (await sandbox.exec("touch planted ~/../agent/planted", user="grader")).ok
    await sandbox.upload("solution", b"read me")
    assert (await sandbox.exec(["cat", "solution"], user="grader")).stdout == b"read me"


@CHECKS.add
async def what_a_grader_has_is_out_of_the_agents_reach(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "grader_user")
    home = sandbox.grader_home
    assert home is not None
    tries = " || ".join(
        command.replace("HOME", home)
        for command in ("cat HOME/hidden", "ls HOME", "touch HOME/made", "rmdir HOME", "mv HOME ~", "chmod 777 HOME")
    )
    assert not (await sandbox.exec(tries)).ok
    await sandbox.upload(f"{home}/hidden", b"tests")
    assert not (await sandbox.exec(tries)).ok
    wrote = await sandbox.exec("cat ~/hidden && umask 0 && mkdir -p ~/a && echo 1 > ~/a/reward", user="grader")
    assert wrote.stdout == b"tests", wrote
    assert not (await sandbox.exec(f"echo 2 > {home}/a/reward")).ok
    await sandbox.kill()
    assert await sandbox.download(f"{home}/a/reward") == b"1\n"
    await sandbox.clear(home)
    assert (await sandbox.exec(f"ls -A {home} && stat -c %a {home}", user="grader")).stdout == b"700\n"


@CHECKS.add
async def an_agent_cannot_end_read_or_trace_a_grader(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "grader_user")
    home = sandbox.grader_home
    assert (await sandbox.exec("mkfifo ~/go", user="grader")).ok
    begun = asyncio.Event()
    grader = asyncio.create_task(
        sandbox.exec(
            "exec 3> ~/reward; echo $$; read -r _ < ~/go; echo 1 >&3",
            user="grader",
            env={"SECRET": "hidden"},
            on_output=lambda _stream, _data: begun.set(),
        )
    )
    try:
        await asyncio.wait({asyncio.create_task(begun.wait()), grader}, return_when=asyncio.FIRST_COMPLETED)
        assert not grader.done(), grader.result()
        attacks = "for p in /proc/[0-9]*; do cat $p/environ; echo 9 > $p/fd/3; ls $p/cwd/ $p/root/; done; kill -9 -1"
        attacked = await sandbox.exec(["sh", "-c", attacks])
        assert b"SECRET" not in attacked.stdout
        released = await sandbox.exec("echo > ~/go", user="grader", timeout_s=20)
        assert released.ok, f"the grader is gone: {released}"
        assert (await grader).ok
    finally:
        grader.cancel()
    assert await sandbox.download(f"{home}/reward") == b"1\n"
