"""`python -m megatron_ext.rl`."""

import sys

from megatron_ext.rl.main import main

if __name__ == "__main__":
    sys.exit(main())
