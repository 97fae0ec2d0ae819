"""slime: converts groups to its `Sample` objects, provides a rollout function, and gives its engines to our nodes.
Shared with miles.

    # my_rollout.py, for slime's --rollout-function-path my_rollout.generate_rollout
    generate_rollout = SlimeRollout(server_url, task_of, folder)

`samples` makes a sample of each trace, `rewards` compares sessions, and `arguments` reads slime's options and refuses
options with which training would be wrong. `rollout` collects in its own thread; `router` lists slime's engines, and
`supply` gives them to the nodes and closes the gates between rollout calls. Start with `rollout`.

Source: slime, github.com/THUDM/slime at 624b824 (2026-08-21): `slime/utils/types.py` (Sample), `slime/ray/rollout.py`
(the fate of samples, its router), `slime/rollout/base_types.py` (the rollout function), `train.py`, `train_async.py`
(when weights change); Polar, figure 5a and A.3 (the callback flow).
"""

from gangline.train.trainers.slime.rewards import post_process_rewards
from gangline.train.trainers.slime.rollout import CONTRACT, DataSource, SlimeRollout
from gangline.train.trainers.slime.samples import to_samples
from gangline.train.trainers.slime.supply import SupplySettings

__all__ = ["CONTRACT", "DataSource", "SlimeRollout", "SupplySettings", "post_process_rewards", "to_samples"]
