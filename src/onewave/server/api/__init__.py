"""One file per endpoint, or per family of them."""
