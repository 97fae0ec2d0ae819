"""The page: its files, and the data of a session for the page. Routes are in the server.

`app/` contains the page's ES modules and `vendor/` the libraries they use, which `web/vendor.py` of the repository
fetches and checks. `files` serves both from memory. `outline` divides a session into chains and calls, `contents`
returns the messages of calls, `tokens` their tokens as `columns` of typed arrays, `decoding` finds the bytes of token
ids. Start with `outline.open_session`.
"""
