"""Routes of other rollout servers, over the same service.

`polar/` and `prorl/` speak for those systems, and `records` writes results in the words that both share. Start with
`polar/routes`.
"""
