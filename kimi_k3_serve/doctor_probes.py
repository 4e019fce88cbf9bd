# SPDX-License-Identifier: Apache-2.0
"""Probes that really use the GPUs. Each runs in processes of its own: a driver that crashes there crashes nothing here.

`python -m kimi_k3_serve.doctor_probes multicast|rendezvous RANK WORLD PORT` is one rank of one.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack

TIMEOUT_S = 60.0
POLL_S = 0.05


def run(probe: str, world: int, environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether every one of `world` ranks, one a GPU, got through the probe; and one line of what they said.

    The first rank that fails ends the others, which would wait for it. PyTorch itself honours
    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in `environment`: no multicast object is then made.
    """
    with socket.socket() as chooser:
        chooser.bind(("127.0.0.1", 0))
        port = str(chooser.getsockname()[1])
    with ExitStack() as stack:
        ranks = []
        for rank in range(world):
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            complaint = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [
                sys.executable,
                "-m",
                "kimi_k3_serve.doctor_probes",
                probe,
                str(rank),
                str(world),
                port,
            ]
            process = subprocess.Popen(command, stdout=said, stderr=complaint, env=dict(environment))
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append((process, said, complaint))
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            running = False
            for rank, (process, _, complaint) in enumerate(ranks):
                status = process.poll()
                running |= status is None
                if status:
                    complaint.seek(0)
                    lines = complaint.read().strip().splitlines() or [f"exit status {status}"]
                    return False, f"rank {rank}: {lines[-1][:160]}"
            if not running:
                ranks[0][1].seek(0)
                return True, ranks[0][1].read().strip().splitlines()[-1]
            if time.monotonic() > deadline:
                return False, f"no answer within {TIMEOUT_S:g} s"
            time.sleep(POLL_S)


def probe_gpus(probe: str, rank: int, world: int, port: str) -> str:
    """Map every rank's symmetric memory, write, and read what the others wrote.

    Raises:
        RuntimeError: wrong bytes, or no multicast object where that is the question.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device
    )
    buffer = symm_mem.empty(1024, dtype=torch.int32, device=device)
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    if probe == "multicast" and not handle.multicast_ptr:
        raise RuntimeError("no multicast object was made over these GPUs")
    buffer.fill_(rank)
    handle.barrier()
    for other in range(world):
        seen = handle.get_buffer(other, (1024,), torch.int32)
        if not bool((seen == other).all()):
            raise RuntimeError(f"rank {rank} reads wrong bytes of rank {other}")
    handle.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return f"{world} ranks map each other" + (" and a multicast object" if probe == "multicast" else "")


def main(probe: str, rank: str, world: str, port: str) -> None:
    try:
        print(probe_gpus(probe, int(rank), int(world), port), flush=True)
    except Exception as error:
        cause = (str(error).strip().splitlines() or [""])[0]
        print(f"{type(error).__name__}: {cause}", file=sys.stderr, flush=True)
        os._exit(1)  # not into destructors that wait for the other ranks


if __name__ == "__main__":
    main(*sys.argv[1:])
