# SPDX-License-Identifier: Apache-2.0
"""The scaling of e4m3 rows in the Triton interpreter against PyTorch, bit for bit. Needs TRITON_INTERPRET=1.

Without what the interpreter does otherwise than a GPU: it reads the two e4m3 NaNs as 480, and truncates where it
should round to bfloat16 (tests/gpu compares all bytes and dtypes; test_publish_ptx.py looks for the rounding).
"""

import json

import torch
import triton.language as tl

from kimi_k3_serve.publish.collective_kernel import unpack_kernel

if __name__ == "__main__":
    rows = torch.arange(256, dtype=torch.uint8).view(4, 64)
    raw, order = rows.view(torch.float8_e4m3fn), torch.arange(4, dtype=torch.int32)
    compared = different = 0
    for scale in (torch.tensor([value]) for value in (1.0, 0.3717, 1e-3, 37.5)):
        for dtype in (torch.float32, torch.float16):
            kv_c, k_pe = torch.empty(4, 48, dtype=dtype), torch.empty(4, 16, dtype=dtype)
            addresses = (tensor.data_ptr() for tensor in (scale, kv_c, k_pe))
            out = getattr(tl, str(dtype).removeprefix("torch."))
            unpack_kernel[(2,)](
                rows.data_ptr(), order.data_ptr(), 4, *addresses,
                LATENT=48, ROPE=16, LATENT_PADDED=64, ROPE_PADDED=16, WORD=tl.uint8, OUT=out, SCALED=True, ROWS=2,
            )  # fmt: skip
            expected = (raw.float() * scale).to(dtype)
            same = (torch.cat([kv_c, k_pe], dim=1) == expected)[~expected.isnan()]
            compared += same.numel()
            different += int((~same).sum())
    print(json.dumps({"compared": compared, "different": different}))
