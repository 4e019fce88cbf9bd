# SPDX-License-Identifier: Apache-2.0
"""Set before any test of this folder starts CUDA."""

import os

# Ranks that share a GPU are streams whose kernels wait for each other: two in one hardware queue would stand still.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
