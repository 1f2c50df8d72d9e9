"""`python -m dilocox` is the same as the console command `dilocox`."""

from dilocox.peer.cli import main

if __name__ == "__main__":
    main()
