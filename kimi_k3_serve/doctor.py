# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 doctor`: what would go wrong after minutes of loading, said in seconds, each with what to do.

A check looks at a Case and yields findings; it never raises for what it looks at. Levels: ok, warn, fail, and
skip where there is nothing to look at (no GPU, no such profile). The exit code is 1 when one failed.
"""

import json
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_k3_serve import doctor_probes, fit, models, nccl_library
from kimi_k3_serve.doctor_host import GPU, Host
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.launch import given
from kimi_k3_serve.profile import Profile
from kimi_k3_serve.topology import Topology

CUDA = (13, 0)  # of the images
BUSY_MIB = 1024
STACK = 67108864
MIN_SHM_MB = 1024
MIN_CACHE_GB = 20.0
PLUGIN = "kimi_k3_serve"  # the entry point's name
DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class Finding:
    """`why` and `remedy` are one line each; ok needs no remedy."""

    check: str
    level: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Case:
    """What is to be served, and where. `model` is a folder or a name on the hub."""

    host: Host
    gpus: list[GPU]
    profile: Profile | None = None
    topology: Topology | None = None
    model: str | None = None
    extra: tuple[str, ...] = ()

    def flags(self) -> dict[str, Any]:
        if self.profile is None:
            return given(self.extra)
        dcp = self.topology is not None and self.topology.dcp > 1
        return {**self.profile.flags, **(self.profile.dcp_flags if dcp else {}), **given(self.extra)}

    def setting(self, name: str) -> str | None:
        """An environment variable as the server would see it."""
        of_profile = dict(self.profile.environment) if self.profile else {}
        if self.profile and self.topology and self.topology.dcp > 1:
            of_profile |= self.profile.dcp_environment
        return of_profile.get(name) or self.host.environment.get(name)


Check = Callable[[Case], Iterator[Finding]]


def weights(case: Case) -> Iterator[Finding]:
    """1. Weights that do not fit; also every combination that serve would refuse (2, 3)."""
    if case.profile is None or case.topology is None or case.profile.machine is None:
        yield Finding("launch", "skip", "needs --profile and --topology of a machine with GPUs")
        return
    found = list(fit.objections(case.profile, case.topology, case.flags()))
    for objection in found:
        why, _, remedy = objection.partition("; ")
        yield Finding("launch", "fail", why, remedy)
    if not found:
        needed, room = fit.weights_gb(case.profile, case.topology), fit.room_gb(case.profile)
        yield Finding("launch", "ok", f"weights take {needed:.1f} of {room:.1f} GB a GPU; flags fit together")


def gpus(case: Case) -> Iterator[Finding]:
    """12. Mixed models, too few, in use by others, ECC errors."""
    if not case.gpus:
        yield Finding(
            "gpus", "skip", "no GPU is visible", "on a GPU host: --gpus all, nvidia-container-toolkit"
        )
        return
    found = [Finding("gpus", "fail", why, remedy) for why, remedy in gpu_faults(case)]
    yield from found or [Finding("gpus", "ok", f"{len(case.gpus)}x {case.gpus[0].name}")]


def gpu_faults(case: Case) -> Iterator[tuple[str, str]]:
    """Why, and what to do."""
    kinds = sorted({gpu.name for gpu in case.gpus})
    if len(kinds) > 1:
        yield f"mixed models: {', '.join(kinds)}", "set CUDA_VISIBLE_DEVICES to one kind"
    if case.profile and (machine := case.profile.machine):
        if machine.gpus_per_node > len(case.gpus):
            yield (
                f"the profile needs {machine.gpus_per_node} GPUs, visible are {len(case.gpus)}",
                "choose another profile or a slice, or make all GPUs visible",
            )
        smallest_gb = min(gpu.memory_mib for gpu in case.gpus) * 1.048576e-3
        if smallest_gb < 0.97 * machine.gpu_memory_gb:
            yield (
                f"{smallest_gb:.0f} GB a GPU, the profile expects {machine.gpu_memory_gb:g}",
                "choose the profile of these GPUs",
            )
    for gpu in case.gpus:
        if gpu.used_mib > BUSY_MIB:
            yield f"GPU {gpu.index}: {gpu.used_mib} MiB are in use", "nvidia-smi shows by whom; stop it"
        if gpu.ecc_errors:
            yield (
                f"GPU {gpu.index}: {gpu.ecc_errors} uncorrected ECC errors",
                "reset or replace it: nvidia-smi -r",
            )


def peer_access(case: Case) -> Iterator[Finding]:
    """12. Missing peer-to-peer access between a pair."""
    if len(case.gpus) < 2:
        yield Finding("p2p", "skip", "needs two GPUs")
        return
    seen = {gpu.index for gpu in case.gpus}
    links = {pair: state for pair, state in case.host.links().items() if seen.issuperset(pair)}
    missing = {pair: state for pair, state in links.items() if state != "OK"}
    for (a, b), state in list(missing.items())[:3]:
        yield Finding(
            "p2p",
            "fail",
            f"no peer access between GPU {a} and {b} ({state})",
            "disable ACS/IOMMU isolation in the firmware, or choose GPUs below one switch",
        )
    if not links:
        yield Finding("p2p", "warn", "nvidia-smi topo -p2p r says nothing", "look at it by hand")
    elif not missing:
        yield Finding("p2p", "ok", "every pair" if len(links) > 1 else "the pair")


def driver(case: Case) -> Iterator[Finding]:
    """9. A driver older than the image's CUDA."""
    if not case.gpus:
        yield Finding("driver", "skip", "no GPU is visible")
        return
    cuda = case.host.cuda_of_driver()
    version = case.gpus[0].driver
    wanted = ".".join(map(str, CUDA))
    if cuda is None:
        yield Finding("driver", "warn", f"driver {version} does not say which CUDA it runs", "update it")
    elif cuda < CUDA:
        yield Finding(
            "driver",
            "fail",
            f"driver {version} runs CUDA {cuda[0]}.{cuda[1]}, the image needs {wanted}",
            "install driver 580 or later on the host",
        )
    else:
        yield Finding("driver", "ok", f"{version} runs CUDA {cuda[0]}.{cuda[1]}")


def multicast(case: Case) -> Iterator[Finding]:
    """4. NVLS multicast, by a rendezvous that creates a multicast object: the device's attribute is not the truth."""
    if len(case.gpus) < 2:
        yield Finding("multicast", "skip", "needs two GPUs")
        return
    remedy = "start the fabric manager (nvidia-fabricmanager); on PCIe nothing is to be done"
    if case.host.environment.get(DISABLE_MULTICAST) == "1":
        works, why, remedy = (
            False,
            f"{DISABLE_MULTICAST}=1",
            f"unset {DISABLE_MULTICAST} if the GPUs can do it",
        )
    else:
        works, why = doctor_probes.run("multicast", len(case.gpus), case.host.environment)
    if works:
        yield Finding("multicast", "ok", why)
    else:
        yield Finding(
            "multicast",
            "warn",
            f"{why}: KV publication falls back to peer stores, direct query and KV gather to NCCL",
            remedy,
        )


def rendezvous(case: Case) -> Iterator[Finding]:
    """5. A symmetric-memory rendezvous among the GPUs, before anything is loaded; without multicast, which is 4."""
    if len(case.gpus) < 2:
        yield Finding("rendezvous", "skip", "needs two GPUs")
        return
    without = {**case.host.environment, DISABLE_MULTICAST: "1", "NCCL_NVLS_ENABLE": "0"}
    works, why = doctor_probes.run("rendezvous", len(case.gpus), without)
    if works:
        yield Finding("rendezvous", "ok", why)
    else:
        yield Finding(
            "rendezvous",
            "fail",
            why,
            "give the container ipc: host and every GPU of the group; see check p2p",
        )


def imex(case: Case) -> Iterator[Finding]:
    """6. IMEX channels, which cuMemCreate needs across trays (MNNVL)."""
    if case.setting("NCCL_MNNVL_ENABLE") != "1":
        yield Finding("imex", "skip", "the profile does not span trays (NCCL_MNNVL_ENABLE)")
        return
    channels = case.host.root / "dev/nvidia-caps-imex-channels"
    usable = [path for path in channels.glob("channel*") if os.access(path, os.R_OK | os.W_OK)]
    if usable:
        yield Finding("imex", "ok", f"{usable[0].name} is accessible")
    else:
        yield Finding(
            "imex",
            "fail",
            "/dev/nvidia-caps-imex-channels/channel* is not accessible: cuMemCreate will not be permitted",
            "start nvidia-imex on every tray and pass --device /dev/nvidia-caps-imex-channels/channel0",
        )


def mlx5(host: Host) -> list[str]:
    return sorted(path.name for path in (host.root / "sys/class/infiniband").glob("mlx5_*"))


def rdma(case: Case) -> Iterator[Finding]:
    """7. dmabuf registration on mlx5 that ends in errno 524."""
    devices = mlx5(case.host)
    if not devices:
        yield Finding("rdma", "skip", "no mlx5 device")
    elif case.setting("NCCL_DMABUF_ENABLE") == "0":
        yield Finding("rdma", "ok", f"{len(devices)} devices, dmabuf is off")
    elif "nvidia_peermem" in (case.host.read("proc/modules") or ""):
        yield Finding("rdma", "ok", f"{len(devices)} devices, nvidia_peermem is loaded")
    else:
        yield Finding(
            "rdma",
            "warn",
            f"{devices[0]} without nvidia_peermem: registration through dmabuf may end in errno 524",
            "modprobe nvidia_peermem on the host and set NCCL_DMABUF_ENABLE=0",
        )


def shared_memory(case: Case) -> Iterator[Finding]:
    """8. A small /dev/shm, and limits on locked memory and stack."""
    size = case.host.shm_mb()
    if size is not None and size < MIN_SHM_MB:
        yield Finding(
            "shm", "fail", f"/dev/shm has {size:.0f} MB (ncclShmOpen fails)", "ipc: host, or shm_size: 16gb"
        )
    else:
        yield Finding("shm", "ok", "no /dev/shm" if size is None else f"/dev/shm has {size:.0f} MB")
    # RDMA registers what it locks; CUDA's own pinned memory is not counted against the limit.
    level = "fail" if mlx5(case.host) else "warn"
    locked, stack = case.host.limit(resource.RLIMIT_MEMLOCK), case.host.limit(resource.RLIMIT_STACK)
    if locked != -1:
        yield Finding("memlock", level, f"locked memory is limited to {locked} bytes", "ulimits: memlock: -1")
    if -1 < stack < STACK:
        yield Finding("stack", "warn", f"the stack is limited to {stack} bytes", f"ulimits: stack: {STACK}")


def autotune(case: Case) -> Iterator[Finding]:
    """10. FlashInfer's autotuning takes memory outside vLLM's pool."""
    utilisation = float(case.flags().get("gpu-memory-utilization", 0))
    off = "no-enable-flashinfer-autotune" in case.flags()
    if utilisation >= 0.95 and not off:
        yield Finding(
            "autotune",
            "fail",
            f"FlashInfer autotuning at memory utilisation {utilisation:g} runs out of memory outside the pool",
            "--no-enable-flashinfer-autotune, or --gpu-memory-utilization 0.92",
        )
    else:
        yield Finding("autotune", "ok", "off" if off else f"memory utilisation {utilisation:g}")


def keep_alive(case: Case) -> Iterator[Finding]:
    """11. vLLM's keep-alive of 5 s drops clients between slow requests."""
    seconds = int(case.setting("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or 5)
    if seconds < 60:
        yield Finding(
            "keep-alive",
            "warn",
            f"connections are closed after {seconds} s without a request",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=900",
        )
    else:
        yield Finding("keep-alive", "ok", f"{seconds} s")


def cache(case: Case) -> Iterator[Finding]:
    """13. Cache folders that cannot be written or are nearly full."""
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        if (value := case.host.environment.get(name)) is None:
            continue
        folder = Path(value)
        above = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(above, os.W_OK):
            yield Finding(
                "cache",
                "fail",
                f"{name}: {folder} is not writable",
                f"chown {os.getuid()} it, or mount another",
            )
        elif (free := case.host.free_gb(folder)) < MIN_CACHE_GB:
            yield Finding("cache", "warn", f"{name}: {free:.0f} GB are free", "make room on that disk")
        else:
            yield Finding("cache", "ok", f"{name}: {free:.0f} GB are free")


def checkpoint(case: Case) -> Iterator[Finding]:
    """13. A checkpoint that lacks shards."""
    if case.model is None:
        yield Finding("checkpoint", "skip", "needs --model")
        return
    try:
        missing = models.missing_shards(folder := models.locate(case.model))
    except UserError as error:
        why, _, remedy = str(error).partition("; ")
        yield Finding("checkpoint", "fail", why, remedy)
        return
    if missing:
        yield Finding(
            "checkpoint",
            "fail",
            f"{len(missing)} shards are missing, the first is {missing[0]}",
            f"kimi-k3 download --model {case.model}",
        )
    else:
        yield Finding("checkpoint", "ok", f"{folder} is whole")


def stock_a2a(case: Case) -> Iterator[Finding]:
    """14. FLASH_ATTN_MLA with vLLM's own a2a, which only the plugin's mended text survives (attention/cures.py)."""
    flags = case.flags()
    asked = (flags.get("attention-backend"), flags.get("dcp-comm-backend")) == ("FLASH_ATTN_MLA", "a2a")
    if not asked or case.topology is None or case.topology.dcp == 1:
        yield Finding("a2a", "skip", "FLASH_ATTN_MLA with a2a is not asked for")
        return
    plugins = case.setting("VLLM_PLUGINS")
    if plugins is None or PLUGIN in plugins.split(","):
        yield Finding("a2a", "ok", "FLASH_ATTN_MLA with a2a is mended by the plugin")
    else:
        yield Finding(
            "a2a",
            "fail",
            f"VLLM_PLUGINS={plugins} leaves {PLUGIN} out: FLASH_ATTN_MLA dies with stock a2a at its first token",
            f"unset VLLM_PLUGINS or add {PLUGIN}; or --attention-backend FLASHMLA",
        )


def nccl(case: Case) -> Iterator[Finding]:
    """15. An NCCL library with which vLLM's own wrapper disables itself."""
    yield Finding("nccl", *nccl_library.judge(case.setting("VLLM_NCCL_SO_PATH")))


CHECKS: tuple[Check, ...] = (
    weights,
    stock_a2a,
    nccl,
    gpus,
    driver,
    peer_access,
    multicast,
    rendezvous,
    imex,
    rdma,
    shared_memory,
    autotune,
    keep_alive,
    cache,
    checkpoint,
)


def examine(case: Case) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(case)]


def failed(findings: list[Finding]) -> bool:
    return any(finding.level == "fail" for finding in findings)


def as_text(findings: list[Finding]) -> str:
    """A line a finding, its remedy below it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.check:10}  {finding.why}")
        if finding.remedy and finding.level != "ok":
            lines.append(f"{'':18}-> {finding.remedy}")
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> str:
    return json.dumps({"failed": failed(findings), "findings": [asdict(item) for item in findings]}, indent=1)
