"""slime and miles, for tests: their types, their programs from checkouts, and a service whose engines they train."""
