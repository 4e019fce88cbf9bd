# SPDX-License-Identifier: Apache-2.0
"""What an NCCL library says of itself. Imports neither PyTorch nor vLLM, and creates no communicator."""

import ctypes

NEEDED_VERSION = 22907
"""As NCCL counts: vLLM 0.32.0 binds ncclCommSuspend, and its own wrapper disables itself where that is missing."""
NEEDED = "vLLM needs NCCL 2.29.7 or later (VLLM_NCCL_SO_PATH)"

REMEDY = "let VLLM_NCCL_SO_PATH name NCCL 2.29.7 or later, as locks/serve.txt pins it"


def version_of(path: str) -> int:
    """As NCCL counts; 0 of a library that is none. Raises OSError where it cannot be loaded."""
    version, library = ctypes.c_int(), ctypes.CDLL(path)
    if hasattr(library, "ncclGetVersion"):
        library.ncclGetVersion(ctypes.byref(version))
    return version.value


def dotted(version: int) -> str:
    """22907 -> 2.29.7"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def judge(path: str | None) -> tuple[str, str, str]:
    """Of what VLLM_NCCL_SO_PATH names, for the doctor: level, why, remedy."""
    if not path:
        return "skip", "VLLM_NCCL_SO_PATH is not set", ""
    try:
        version = version_of(path)
    except OSError as error:
        return "warn", f"{error}: vLLM disables its own NCCL wrapper", REMEDY
    if version < NEEDED_VERSION:
        what = f"NCCL {dotted(version)}" if version else "no NCCL library"
        return "warn", f"{path} is {what}, with which vLLM disables its own NCCL wrapper", REMEDY
    return "ok", f"{path} is NCCL {dotted(version)}", ""
