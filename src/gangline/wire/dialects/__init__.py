"""Converts provider wire formats to and from the domain, including streaming. Pure: bytes in, bytes out, no sockets, no
clock.

Every dialect implements `contract`. Each provider has a folder: `dialect` lists its routes, `request` parses calls and
`reply` writes answers. Start with `contract`, then `chat/dialect`.
"""
