"""Hugging Face safetensors to Megatron checkpoints and back; see --help.

    python tools/convert_checkpoint.py to-megatron --hf DIR --out DIR --tp 2 --ep 4 --verify
    python tools/convert_checkpoint.py to-hf --megatron DIR --out DIR --verify
"""

import sys

from megatron_ext.checkpoint.convert import main

if __name__ == "__main__":
    sys.exit(main())
