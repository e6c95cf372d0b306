"""Constants that the CPU kernels share."""

LANES = 16
"""Lanes of a vector: float32 in AVX-512, in two registers of AVX2 or four of NEON."""
