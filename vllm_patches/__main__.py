"""Runs vLLM's own command line with vLLM's CPU build: `python -m vllm_patches serve MODEL …`."""

import sys

from vllm_patches import cpu_version_name

cpu_version_name.install()
from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
