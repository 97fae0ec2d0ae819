"""The environments of one session: their servers, the agent's calls, and the record of these. Start with
`session_environments`."""
