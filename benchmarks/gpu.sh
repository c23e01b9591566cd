#!/usr/bin/env bash
# Everything that one GPU can say about moec's kernels, in under 8 minutes: benchmarks/results/gpu_<card>.json.
# Needs Python with torch (2.11 or newer) and triton; nothing is installed, no network.  Safe to stop at any time.
#
#     benchmarks/gpu.sh [--minutes 8] [--only TEXT] [--dry]      (PYTHON=... chooses the interpreter)
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" "$@"
