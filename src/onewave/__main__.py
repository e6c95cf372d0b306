"""`python -m onewave` is the `onewave` command."""

from __future__ import annotations

from onewave.cli.start import main

if __name__ == "__main__":
    main()
