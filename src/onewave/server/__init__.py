"""The HTTP server: OpenAI-compatible endpoints over one AsyncLLM."""
