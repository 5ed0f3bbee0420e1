"""`python -m flowalign`."""

from flowalign.cli import main

if __name__ == "__main__":
    main()
