"""verl: sessions for its v1 trainer, and groups as its `DataProto`.

`agent_loop` is the class that verl's configuration names. It starts one `worker`, in which `sessions` carry out verl's
prompts and `sampler` serves verl's own engines to the nodes; `prompts` and `rows` are the two sides of its transfer
queue. `settings` reads its part of verl's configuration. `experiment` is the file of a run, and `launch` starts it in
verl's interpreter, after `check`. `batches` is for trainers of your own. Start with `agent_loop`.
"""
