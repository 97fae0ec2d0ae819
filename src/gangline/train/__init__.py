"""From groups of sessions to batches: collection, selection, credit, masks, advantages, the loss and packing.

`collecting/` fetches groups of sessions, `learning/` turns them into a gradient step, `weights/` sends new weights to
the engines, and `run/` runs a whole experiment. Array code is NumPy; only the loss and the learner need PyTorch. The
server is reached through a `RolloutClient` (`collecting/service`), such as `gangline.wire.client.ServerClient`. Start
with `run/trainer`.
"""
