# SPDX-License-Identifier: Apache-2.0
"""The dequantisation kernel in the Triton interpreter against PyTorch, bit for bit. Needs TRITON_INTERPRET=1.

Without what the interpreter does otherwise than a GPU: it reads the two e4m3 NaNs as 480, and truncates where it
should round to bfloat16 (tests/gpu compares all bytes and dtypes; test_publish_ptx.py looks for the rounding).
"""

import json

import torch

from kimi_k3_serve.publish.kernel import dequantise_kernel
from kimi_k3_serve.publish.publisher import dequantise

if __name__ == "__main__":
    raw = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    compared = different = 0
    for scale in (torch.tensor([value]) for value in (1.0, 0.3717, 1e-3, 37.5)):
        for dtype in (torch.float32, torch.float16):
            out = torch.empty(raw.shape, dtype=dtype)
            dequantise_kernel[(4,)](raw.view(torch.uint8), scale, out, raw.numel(), BLOCK=64)
            expected, _ = dequantise(raw, raw, scale, dtype)
            same = (out == expected)[~expected.isnan()]
            compared += same.numel()
            different += int((~same).sum())
    print(json.dumps({"compared": compared, "different": different}))
