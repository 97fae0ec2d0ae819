"""The tools `web_search` and `fetch_page`, over the search sources that the node's operator configured.

`sources` decides whether a session may use a source, and opens it. `local` searches documents on the node's disk with
an `index`; `web` queries providers, and `pages` reads web pages. Other kinds implement `provider.SearchProvider`. Start
with `sources`.
"""
