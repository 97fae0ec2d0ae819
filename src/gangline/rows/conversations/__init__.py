"""Sessions as conversations: their main one as messages, and files of them. Start with `conversation`."""
