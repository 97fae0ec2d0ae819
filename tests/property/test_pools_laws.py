"""How many sessions a node leases, through random lives of its pools: never more than fit, never fewer than could."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gangline.node.sessions.stages import Pools, PoolSizes

_SIZES = st.builds(
    PoolSizes,
    init_workers=st.integers(1, 4),
    ready_slots=st.integers(0, 4),
    run_slots=st.integers(1, 4),
    postrun_workers=st.integers(1, 3),
)


class Held:
    """How many sessions of a node are in each stage, and what is always true of them."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self.pools = Pools(sizes)
        self.init = self.ready = self.postrun = 0

    @property
    def run(self) -> int:
        return self.pools.run.num_taken

    def num_free(self) -> int:
        in_all = self.init + self.ready + self.run + self.postrun
        return self.pools.num_free(self.init, self.ready, in_all)

    def settle(self) -> None:
        """Whoever is ready runs as soon as there is a place."""
        while self.ready and self.pools.run.num_free:
            self.ready -= 1
            self.pools.run.num_taken += 1

    def check(self) -> None:
        assert self.init <= self.sizes.init_workers
        assert self.ready <= self.sizes.ready_slots
        assert self.init + self.ready + self.run + self.postrun <= self.sizes.capacity


@given(_SIZES, st.lists(st.tuples(st.sampled_from(["lease", "prepared", "ran", "ended"]), st.integers(1, 8))))
def test_no_stage_ever_holds_more_than_its_places(sizes: PoolSizes, steps: list[tuple[str, int]]) -> None:
    held = Held(sizes)
    for step, number in steps:
        if step == "lease":
            held.init += min(number, held.num_free())
        elif step == "prepared" and held.init:
            held.init, held.ready = held.init - 1, held.ready + 1
        elif step == "ran" and held.run:
            held.pools.run.num_taken -= 1
            held.postrun += 1
        elif step == "ended" and held.postrun:
            held.postrun -= 1
        held.settle()
        held.check()


@given(_SIZES, st.integers(0, 8), st.integers(0, 8))
def test_a_node_with_nothing_before_run_leases_whenever_a_place_would_be_reached(
    sizes: PoolSizes, running: int, postrun: int
) -> None:
    held = Held(sizes)
    held.pools.run.num_taken = min(running, sizes.run_slots)
    held.postrun = min(postrun, sizes.capacity - held.run)
    reachable = sizes.ready_slots + held.pools.run.num_free
    room = sizes.capacity - held.run - held.postrun
    assert held.num_free() == min(sizes.init_workers, reachable, room)
