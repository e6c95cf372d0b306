"""`python -m onewave` is the `onewave` command."""

from onewave.cli.start import main

if __name__ == "__main__":
    main()
