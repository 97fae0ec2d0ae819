"""`gangline vet`: the audit of tasks. Start with `vet`."""
