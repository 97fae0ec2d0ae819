"""Sessions as conversations: the main one as messages, and files of them. Start with `conversation`."""
