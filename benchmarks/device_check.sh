#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check and measure swapping on the accelerator of this machine, in under 8 minutes.
#
#     benchmarks/device_check.sh --out build/device_check          # a CUDA machine
#     benchmarks/device_check.sh --device sim --out build/rehearsal  # the simulated accelerator
#
# Needs a Python with torch (and numpy) and this checkout; downloads and installs nothing. Takes the
# Python that PYTHON names, or the first of python3 and python that has torch. Other options are those
# of device_check.py. Exit code: 0 all passed, 1 something did not, 2 nothing could be run.
set -u
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

found=""
for each in ${PYTHON:-} python3 python /opt/conda/bin/python; do
    if command -v "$each" >/dev/null 2>&1 && "$each" -c "import torch" >/dev/null 2>&1; then
        found="$(command -v "$each")"
        break
    fi
done
if [ -z "$found" ]; then
    echo "device_check: no Python with torch; tried PYTHON='${PYTHON:-}', python3, python," \
        "/opt/conda/bin/python. Set PYTHON to one." >&2
    exit 2
fi
echo "device_check: $found"
exec "$found" "$here/device_check.py" "$@"
