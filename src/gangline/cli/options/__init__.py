"""Options that several commands share.

Each module has those of one subject: node, stages, storage, cluster, tracing. Start with `node`.
"""
