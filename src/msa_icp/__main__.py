"""`python -m msa_icp`: the same as `msa-icp`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
