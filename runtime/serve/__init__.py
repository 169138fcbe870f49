"""The server: OpenAI's API over `LLM`."""
