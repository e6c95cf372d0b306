"""What an answer's text says: its content, its reasoning, its tool calls. No torch, no HTTP."""
