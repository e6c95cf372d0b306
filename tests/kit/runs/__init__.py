"""Compiled kernels run thread by thread in NumPy, on what they were launched with, against plain numbers."""
