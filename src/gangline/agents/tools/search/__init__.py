"""The tools `web_search` and `fetch_page`, over the search sources that the node's operator has named.

`sources` decides whether a session may use a source, and opens it. `local` searches documents on the node's disk by an
index of `index`; `web` asks providers, and `pages` reads pages. A further kind implements `provider.SearchProvider`.
Start with `sources`.
"""
