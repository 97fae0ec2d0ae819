"""Evidence about sampled tokens, such as routed experts. Start with `contract`."""
