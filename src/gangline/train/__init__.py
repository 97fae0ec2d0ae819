"""Groups of sessions in, batches out: collecting, judging, crediting, masks, advantages, one loss, packing.

`collecting/` fetches groups of sessions, `learning/` turns them into a gradient step, `weights/` brings new weights to
the engines, and `run/` is a whole experiment. Array code is NumPy; PyTorch is needed by the loss and the learner alone.
The server is known only as a `RolloutClient` (`collecting/service`), which `gangline.wire.client.ServerClient` is.
Start with `run/trainer`.
"""
