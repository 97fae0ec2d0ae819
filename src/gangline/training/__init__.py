"""Groups of sessions in, batches out: collecting, judging, crediting, masks, advantages, one loss, packing.

What is neutral to the trainer. Array code is NumPy, and PyTorch in `loss` and `forward` alone; it knows the server
only as a `RolloutClient` (`gangline.training.collecting.collector`), which `gangline.client.ServerClient` is.
"""
