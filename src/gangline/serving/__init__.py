"""The OpenAI routes with vLLM's token fields, over anything that samples tokens."""
