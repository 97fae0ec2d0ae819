"""prime-rl: groups as its `TrainingSample`s, packed by its packer and written where its trainer reads them.

    async with ServerClient(url) as service, ReplenishingCollector(service, tasks, num_in_flight=64) as collector:
        await feed(output_dir, collector, ServiceWeights(service, folder), settings, algorithm("grpo"))

`feed` replaces prime-rl's orchestrator beside its `trainer`. prime-rl has the loss, the optimiser, and the ratio to the
engines' log-probs. Start with `samples`, then `feed`.
"""
