"""Splits an answer's text into content, reasoning and tool calls. No torch, no HTTP."""
