"""PTX run thread by thread in NumPy."""
