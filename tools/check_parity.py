"""Is logdiff exactly zero for this model and these layouts? Starts real vLLM and real Megatron; see --help.

    python tools/check_parity.py --hf DIR --train-tp 2 --train-ep 2 --rollout-tp 2 --rollout-ep
"""

import sys

from megatron_ext.parity.check import main

if __name__ == "__main__":
    sys.exit(main())
