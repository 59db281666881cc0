"""What is in a checkpoint, Hugging Face or Megatron, and in what two of them differ; see --help.

    python tools/inspect_checkpoint.py DIR [--tensors] [--digests] [--against DIR]
"""

import sys

from megatron_ext.checkpoint.inspection import main

if __name__ == "__main__":
    sys.exit(main())
