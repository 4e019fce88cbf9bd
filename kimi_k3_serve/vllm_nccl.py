# SPDX-License-Identifier: Apache-2.0
"""Why vLLM's own NCCL wrapper is disabled, where it is.

vLLM binds every NCCL function by name when a group starts. Where the library is missing or lacks one, its
`PyNcclCommunicator` sets `disabled`, mostly without a word, and the group's collectives go through
`torch.distributed`. The cures (attention/cures.py) let it say so.
"""

from typing import Any

from vllm import envs
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.logger import init_logger
from vllm.utils.nccl import find_nccl_library

from kimi_k3_serve import nccl_library
from kimi_k3_serve.inspection import verdict
from kimi_k3_serve.nccl_library import NEEDED, dotted

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what its own logger's children say


def state() -> dict[str, Any]:
    """{"active", "reason"}: whether the wrapper carries what vLLM's TP and DCP groups of several ranks exchange."""
    several = [group for group in (get_tp_group(), get_dcp_group()) if group.world_size > 1]
    if not several:
        return verdict(False, "one rank has no collectives")
    wrappers = [getattr(group.device_communicator, "pynccl_comm", None) for group in several]
    versions = [wrapper.nccl_version for wrapper in wrappers if wrapper is not None and not wrapper.disabled]
    if len(versions) < len(wrappers):
        return verdict(False, objection() or "the NCCL library is good, yet vLLM does not use it")
    return verdict(True, f"NCCL {dotted(versions[0])}")


def warn() -> None:
    """One line in the engine's log, of the first rank of a host."""
    logger.warning_once(
        "vLLM's own NCCL wrapper is disabled, its collectives go through torch.distributed: %s", objection()
    )


def objection() -> str | None:
    """Why vLLM cannot use the NCCL library that it loads here; None where it can. Asks that library itself."""
    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set"
    version = 0
    try:
        name = find_nccl_library()
        version = nccl_library.version_of(name)
        NCCLLibrary(name)
    except (OSError, ValueError) as error:
        return f"{error}; {NEEDED}"
    except AttributeError as missing:
        what = f"NCCL {dotted(version)}, {name}," if version else name
        return f"{what} lacks {missing.name}; {NEEDED}"
    except Exception as error:  # said inside vLLM's own fallback, which no log line may end
        return f"{error!r}; {NEEDED}"
    return None
