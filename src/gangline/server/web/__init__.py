"""The page: its files, and the data of a session as the page reads them. No routes: those are the server's.

`app/` has the page's ES modules and `vendor/` the libraries under them, which `web/vendor.py` of the repository fetches
and checks. `files` serves both from memory. `outline` divides a session into chains and calls, `contents` has the
messages of calls, `tokens` their tokens, as `columns` of typed arrays. Start with `outline.open_session`.
"""
