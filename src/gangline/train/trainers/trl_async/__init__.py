"""TRL's asynchronous GRPO: its trainer trains while the service collects, on our rows, groups and advantages.

    rollouts = AsyncServiceRollouts(connect, args, algorithm("grpo"))
    AsyncGRPOTrainer(..., args=args, rollout_worker=rollouts, weight_transfer=rollouts).train()

Start with `worker`. It is not TRL's session factory (`HarnessRolloutWorker`): there each session is chained into rows
and compared by TRL, which leaves sessions without a reward out of their group silently, and knows no token's version.
"""
