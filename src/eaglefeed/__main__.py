"""`python -m eaglefeed` is `eaglefeed`."""

from eaglefeed.cli import main

if __name__ == "__main__":
    main()
