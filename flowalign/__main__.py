"""`python -m flowalign`."""

from flowalign.cli.main import main

if __name__ == "__main__":
    main()
