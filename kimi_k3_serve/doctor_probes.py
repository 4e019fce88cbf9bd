# SPDX-License-Identifier: Apache-2.0
"""Probes that really use the GPUs. Each runs in a process of its own: a driver that crashes there crashes nothing here.

`python -m kimi_k3_serve.doctor_probes multicast|rendezvous RANK WORLD PORT` is one such process.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_S = 60.0


def multicast(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a multicast object over the GPUs can be made, and why (not)."""
    if environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        return False, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    return run("multicast", 1, environment)


def rendezvous(world: int, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether `world` processes, one a GPU, can map each other's symmetric memory and read what others wrote."""
    return run("rendezvous", world, environment)


def run(probe: str, world: int, environment: Mapping[str, str]) -> tuple[bool, str]:
    with socket.socket() as chooser:
        chooser.bind(("127.0.0.1", 0))
        port = str(chooser.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "kimi_k3_serve.doctor_probes", probe, str(rank), str(world), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(processes):
            said, complaints = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                last = (complaints.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                return False, f"rank {rank}: {last[:160]}" if world > 1 else last[:160]
        return True, said.strip()
    except subprocess.TimeoutExpired:
        return False, f"no answer within {TIMEOUT_S:g} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def probe_multicast() -> str:
    """Ask each device, then the library that would use it: the attribute alone is not the truth."""
    import torch
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    for index in range(torch.cuda.device_count()):
        if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, index):
            sys.exit(f"GPU {index} has no multicast")
    return f"{torch.cuda.device_count()} GPUs support multicast"


def probe_rendezvous(rank: int, world: int, port: str) -> str:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=torch.device(rank),
    )
    buffer = symm_mem.empty(1024, dtype=torch.int32, device=torch.device("cuda", rank))
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    buffer.fill_(rank)
    handle.barrier()
    for other in range(world):
        seen = handle.get_buffer(other, (1024,), torch.int32)
        if not bool((seen == other).all()):
            sys.exit(f"rank {rank} reads wrong bytes of rank {other}")
    handle.barrier()
    torch.cuda.synchronize()
    multicast_object = "with" if handle.multicast_ptr else "without"
    dist.destroy_process_group()
    return f"{world} ranks map each other, {multicast_object} a multicast object"


def main(probe: str, rank: str, world: str, port: str) -> None:
    print(probe_multicast() if probe == "multicast" else probe_rendezvous(int(rank), int(world), port))


if __name__ == "__main__":
    main(*sys.argv[1:])
