"""NeMo RL: a collector that fills the replay buffer of its asynchronous GRPO, replacing its own.

    with collecting_with(NemoService(server_url, tasks_of)):
        async_grpo_train(...)

NeMo RL keeps the trainer, the buffer, the importance correction and the transfer of weights; this package runs tasks
and provides groups for the step that will train on them. `batches` makes its batches, `collector` fills the buffer,
`actor` has the methods that its loop calls, and `seam` installs the actor in that loop. Start with `seam`.

Source: NeMo RL, github.com/NVIDIA-NeMo/RL at 7ea279a (2026-08-22): `async_grpo_train` in `nemo_rl/algorithms/grpo.py`,
`nemo_rl/algorithms/async_utils/`; Polar's description of driving NeMo RL.
"""

from gangline.train.trainers.nemo_rl.actor import NemoActor
from gangline.train.trainers.nemo_rl.batches import to_batch
from gangline.train.trainers.nemo_rl.collector import CONTRACT, Buffer, NemoCollector, NemoSettings
from gangline.train.trainers.nemo_rl.seam import NemoService, collecting_with

__all__ = [
    "CONTRACT",
    "Buffer",
    "NemoActor",
    "NemoCollector",
    "NemoService",
    "NemoSettings",
    "collecting_with",
    "to_batch",
]
