"""`python -m alpha.cli`: the command line without what alpha/__main__.py does first. Floor 9."""

import sys

from alpha.cli import main

if __name__ == "__main__":
    sys.exit(main())
