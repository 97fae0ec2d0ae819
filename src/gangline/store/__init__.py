"""What lasts: the journal of completions, tasks and sessions, results."""
