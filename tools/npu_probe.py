"""What does this NPU do where its documentation says nothing? See --help, and ascendc_kernels/probe/README.md.

    python tools/npu_probe.py --json probe.json          # then: --npu-probe probe.json on every run
    python tools/npu_probe.py --device model             # the same questions to the host model
"""

import sys

from megatron_ext.probe.run import main

if __name__ == "__main__":
    sys.exit(main())
