"""Doors for other ecosystems, standing on ops: `flash_attn` with its signatures, `transformers` by importing it."""
