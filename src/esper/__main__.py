"""Entry point of `python -m esper`, and so of `torchrun … -m esper train`."""

from esper.cli import main

if __name__ == "__main__":
    main()
