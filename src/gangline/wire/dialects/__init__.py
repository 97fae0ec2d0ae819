"""Provider wire formats <-> domain, streaming grammars included. Pure: bytes in, bytes out, no sockets, no clock.

Every dialect implements `contract`; each provider has a folder whose `dialect` names its routes, whose `request` reads
calls and whose `reply` writes answers. Start with `contract`, then `chat/dialect`.
"""
