"""Provider wire formats <-> domain, streaming grammars included. Pure: bytes in, bytes out, no sockets, no clock."""
