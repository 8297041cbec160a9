"""A step's phases over the ranks."""

from itertools import chain

from fastrl.report.metrics import NESTED, STEP
from fastrl.training.parallel.world import World


def over_ranks(world: World, numbers: dict[str, float]) -> dict[str, float]:
    """A step's metrics with the seconds and the memory of the rank that has most, and of several ranks their means.

    `time/imbalance` is the part of the step in which a rank waits for the slowest one, on average.
    """
    if world.size == 1:
        return numbers
    own = {name: value for name, value in numbers.items() if name.startswith(("time/", "memory/"))}
    ranks = world.gathered(own)
    names = dict.fromkeys(chain(*ranks))
    most = {name: max(rank.get(name, 0.0) for rank in ranks) for name in names}
    means = {f"mean_{name}": sum(rank.get(name, 0.0) for rank in ranks) / world.size for name in names}
    step, _ = most.get(STEP), means.pop(f"mean_{STEP}", None)
    numbers = numbers | most | means
    if step is not None:
        phases = [name for name in most if name.startswith("time/") and name not in (STEP, *NESTED)]
        waited = sum(most[name] - means[f"mean_{name}"] for name in phases)
        numbers["time/imbalance"] = waited / step
    return numbers
