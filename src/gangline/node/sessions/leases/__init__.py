"""A node's leases, from the server and back to it.

`server_link` takes, renews and gives back leases, `delivery` posts results, and `recovery` settles attempts from before
a restart. `rollout_server` has the protocols that a client implements. Start with `server_link`, then `delivery`.
"""
