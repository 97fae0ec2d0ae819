"""prime-rl: converts groups to its `TrainingSample`s, packs them with its packer and writes them where its trainer
reads them.

    async with ServerClient(url) as service, ReplenishingCollector(service, tasks, num_in_flight=64) as collector:
        await feed(output_dir, collector, ServiceWeights(service, folder), settings, algorithm("grpo"))

`feed` replaces prime-rl's orchestrator and runs alongside its `trainer`. prime-rl provides the loss, the optimiser, and
the ratio to the engines' log-probs. Start with `samples`, then `feed`.
"""
