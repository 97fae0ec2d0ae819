"""verl: runs sessions for its v1 trainer, and converts groups to its `DataProto`.

`agent_loop` is the class named in verl's configuration. It starts one `worker`, in which `sessions` run verl's prompts
and `sampler` serves verl's own engines to the nodes; `prompts` and `rows` are the two sides of its transfer queue.
`settings` reads our part of verl's configuration. `experiment` is the file of a run, and `launch` starts it in verl's
interpreter, after `check`. `batches` is for custom trainers. Start with `agent_loop`.
"""
