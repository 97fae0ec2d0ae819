"""A node's leases, from the server and back to it.

`server_link` takes, renews and gives back leases, `delivery` hands in results, and `recovery` settles an earlier life's
attempts. `rollout_server` says what they need of a client. Start with `server_link`, then `delivery`.
"""
