"""Attacks on the walls of a runtime, written against its contract, so that any runtime's author can run them.

    ATTACKS = attacks(isolated=True)

    @pytest.fixture(scope="module")
    async def grounds(tmp_path_factory):
        async with attacked_grounds(MyRuntime(), tmp_path_factory.mktemp("grounds"), ATTACKS) as grounds:
            yield grounds

    @pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
    async def test_my_runtime_withstands(attack, grounds):
        assert_held(await grounds.attacked(attack))

`attacked_grounds` plants secrets wherever a process can have one, on the host and in a second sandbox, and starts the
sandbox that most attacks share. An attack is a program that runs inside, or a use of the runtime from outside while the
agent misbehaves inside; it returns evidence when it succeeded. Programs inside print a verdict: one without a verdict
is a failure of the attack, never a pass.

An attack that cannot succeed is not a check. `open_runtime.OpenRuntime` has no walls, and every attack succeeds in it
but those on things that this machine's kernel does not have: run them there too when you add one. It needs root.

`attack` defines an attack, `grounds` is its place, and `suites/` has the attacks. Start with `attack`.
Programs that a sandbox must contain: `sh`, coreutils, util-linux and `python3`.
"""

from __future__ import annotations

from support.hostility.attack import Attack, Attacks, Verdict
from support.hostility.grounds import Grounds, attacked_grounds
from support.hostility.suites import (
    channels,
    exhaustion,
    forwarding,
    kernel_doors,
    keyrings,
    layers,
    leftovers,
    machine_files,
    network,
    privileges,
    processes,
    reuse,
    survivors,
    tools,
    transfers,
)

__all__ = ["Attack", "Grounds", "Verdict", "assert_held", "attacked_grounds", "attacks"]

_PARTS: tuple[Attacks, ...] = tuple(
    part.ATTACKS
    for part in (
        keyrings, processes, channels, privileges, kernel_doors, machine_files, network, forwarding,
        survivors, transfers, leftovers, layers, reuse, exhaustion, tools,
    )
)  # fmt: skip


def attacks(*, isolated: bool) -> list[Attack]:
    """Those that a runtime with or without isolation must withstand."""
    return [attack for part in _PARTS for attack in part.all if isolated or not attack.needs_isolation]


def assert_held(verdict: Verdict) -> None:
    """Raises: AssertionError, with the evidence, when the attack succeeded or could not be made."""
    assert verdict.outcome in ("held", "absent"), f"{verdict.outcome}: {verdict.told}"
