"""Analysers of compiled kernels' text: what compilers once did wrongly, and what a kernel must not do."""
