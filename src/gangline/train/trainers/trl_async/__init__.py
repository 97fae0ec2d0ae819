"""TRL's asynchronous GRPO: its trainer trains on our rows, groups and advantages while the service collects.

    rollouts = AsyncServiceRollouts(connect, args, algorithm("grpo"))
    AsyncGRPOTrainer(..., args=args, rollout_worker=rollouts, weight_transfer=rollouts).train()

Start with `worker`. This does not use TRL's session factory (`HarnessRolloutWorker`), with which TRL chains each
session into rows and compares them, silently drops sessions without a reward from their group, and does not know token
versions.
"""
