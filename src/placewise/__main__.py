"""`python -m placewise` is `placewise`."""

from placewise.cli import main

if __name__ == "__main__":
    main()
