# SPDX-License-Identifier: Apache-2.0
import json
import os
import pickle
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import peer_oracle
import pytest
import torch

import kimi_k3_serve
from kimi_k3_serve.attention.merge import merge_partials
from kimi_k3_serve.attention.peer_exchange import (
    BLOCKS,
    FLAG_BYTES,
    TIMEOUT,
    Geometry,
    PeerExchange,
    aligned,
)
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.symmetric.deadline import RendezvousTimeout, limit_s
from kimi_k3_serve.symmetric.region import Region

HERE = Path(__file__).parent


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_kernels_themselves_over_shared_memory_equal_the_oracle(world_size: int) -> None:
    """W processes in the Triton interpreter, each spinning on the others' flags, one of them late each time."""
    done = subprocess.run(
        [sys.executable, str(HERE / "peer_ranks.py"), str(world_size)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.split() == [str(world_size)], done.stderr[-3000:]


def layers(world_size: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "peer_layers.py"), str(world_size)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("world_size", [2, 8])
def test_peer_decode_inside_vllms_layers_equals_the_cpu_owner(world_size: int) -> None:
    """The shared layer and Kimi-K3's own; a batch above the bound and a machine without peers fall back.

    The log of the ranks says each time which way decode goes, through vLLM's own logging configuration.
    """
    done = layers(world_size)
    lines = done.stdout.splitlines()
    cases = ["shared-peer", "kimi-peer", "collective-fallback"]
    held = [line for line in lines if line in cases]
    assert sorted(held) == sorted(world_size * cases), done.stderr[-4000:]
    for words in (
        "Using peer memory (shared) for MLA decode: up to 128 tokens, ",
        "Decode batch of more than 1 tokens: gathered and merged over NCCL, not over peers",
        "Decode queries and outputs go over NCCL, not over peers: peer: rank 0: cpu has no GPU peers",
    ):
        assert sum(f"] {words}" in line for line in lines) == 1, done.stdout


def test_without_dcp_a_peer_backend_is_the_kernel_it_wraps() -> None:
    done = layers(1)
    assert done.stdout.split() == ["peer-alone"], done.stderr[-4000:]


def test_every_logger_of_the_package_is_a_child_of_vllms() -> None:
    """The only one that vLLM configures: an INFO line of another appears in no engine's log."""
    package = Path(kimi_k3_serve.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    named = {file: re.findall(r"(?:init_logger|getLogger)\((.*?)\)", text) for file, text in texts.items()}
    found = {(file, name) for file, names in named.items() for name in names}
    assert {file for file, _ in found} >= {"peer.py", "b12x.py", "install.py", "gather.py", "hook.py"}
    assert not {each for each in found if not each[1].lstrip("f").startswith('"vllm.')}


def test_a_registered_backend_survives_a_spawned_process() -> None:
    """Its name is new to vLLM's enumeration; a spawned process unpickles the configuration before any plugin runs."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kimi_k3_serve.attention import backends

    backends.install()
    members = [AttentionBackendEnum[name] for name in (*backends.BACKENDS, "FLASHMLA")]
    script = "import pickle, sys; print(*(m.name for m in pickle.loads(sys.stdin.buffer.read())))"
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(members), capture_output=True)
    assert done.stdout.decode().split() == [member.name for member in members], done.stderr


HOPPER, BLACKWELL = [(9, 0)], [(9, 0), (10, 0), (10, 3)]


@pytest.mark.parametrize(
    ("name", "taken"),
    [("PEER_FLASH_ATTN_MLA", HOPPER), ("PEER_FLASHMLA", HOPPER), ("PEER_TRITON_MLA", BLACKWELL)],
)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_vllms_selector_takes_peer_backends_on_their_gpus(
    monkeypatch: pytest.MonkeyPatch, name: str, taken: list[tuple[int, int]], capability: tuple[int, int]
) -> None:
    """As on a GPU of this capability with every kernel compiled, which the wheel for CPUs lacks."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kimi_k3_serve.attention import backends

    for kernel in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(fa_utils, kernel, None, raising=False)
    from vllm.v1.attention.backends.mla import flashattn_mla
    from vllm.v1.attention.ops import flashmla

    monkeypatch.setattr(flashattn_mla, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashmla, "_is_flashmla_available", lambda: (True, None))
    family = SimpleNamespace(is_device_capability_family=lambda family: family == 10 * capability[0])
    monkeypatch.setattr(flashmla, "current_platform", family)
    backends.install()
    backend = AttentionBackendEnum[name].get_class()

    def reasons(use_pcp: bool) -> list[str]:
        return backend.validate_configuration(  # type: ignore[no-any-return]
            head_size=576,
            dtype=torch.bfloat16,
            kv_cache_dtype="auto",
            block_size=None,
            use_mla=True,
            has_sink=False,
            use_sparse=False,
            use_mm_prefix=False,
            use_per_head_quant_scales=False,
            device_capability=DeviceCapability(*capability),
            attn_type="decoder",
            use_pcp=use_pcp,
            use_dcp=True,
        )

    assert (reasons(use_pcp=False) == []) == (capability in taken)
    assert any("context parallel" in reason.lower() or "pcp" in reason.lower() for reason in reasons(True))


@pytest.mark.parametrize(("arch", "world_size", "rows"), [(90, 2, 1), (90, 8, 8), (100, 4, 8)])
def test_the_kernels_compile_without_a_gpu(arch: int, world_size: int, rows: int) -> None:
    """To a cubin for Hopper and Blackwell: 16-byte accesses to peers, release and acquire at system scope."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "peer_ptx.py"), str(arch), str(world_size), str(rows)],
        capture_output=True,
        text=True,
        check=True,
    )
    gather, merge = (json.loads(line) for line in done.stdout.splitlines())
    for kernel in (gather, merge):
        assert kernel["multimem"] == 0
        assert kernel["shared_bytes"] <= 4096  # small blocks: a whole grid is resident at once
        assert kernel["narrow_stores"] == kernel["narrow_loads"] == 0
    # One unit a thread: to each peer; from each into the query of this rank, and zeroes where this thread read it.
    assert gather["relaxed_loads"] == world_size - 1 and gather["relaxed_stores"] == 2 * (world_size - 1)
    assert gather["wide_stores"] == world_size and gather["wide_loads"] == 1
    assert (
        gather["signals"] == gather["acquire_sys"] == gather["exchanged"] == 0
    )  # nothing passes between threads
    assert merge["wide_stores"] >= world_size * (4 if rows > 1 else 1)
    assert merge["wide_loads"] >= 2 * world_size - 1
    assert merge["signals"] == 1 and merge["fences"] == 2  # however many ranks; the other one ends a kernel
    assert merge["acquire_sys"] == 2  # all flags at once: before the loop and in it


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_merge_partials_equals_the_float64_oracle(world_size: int, base_e: bool) -> None:
    outputs, lses = peer_oracle.partials(world_size, 7, 5, 16, seed=world_size, base_e=base_e)
    merged, _ = merge_partials(outputs, lses, base_e=base_e)
    expected = peer_oracle.merged(outputs, lses, base_e=base_e)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_merges_grid_is_bounded_and_holds_its_rows_or_is_full() -> None:
    geometry = Geometry(48, 512, 64, torch.bfloat16, torch.bfloat16, max_tokens=64)
    exchange = PeerExchange(Region.group(2, geometry.nbytes(2))[0], geometry)
    for tokens in (1, 2, 7, 8, 32, 64):
        grid, rows = exchange.grid(tokens)
        assert grid <= BLOCKS and rows & (rows - 1) == 0
        assert grid * rows >= min(tokens * 48, BLOCKS * rows)


def test_what_does_not_fit_is_refused_by_name() -> None:
    geometry = Geometry(2, 32, 8, torch.float32, torch.float32, max_tokens=4)
    regions = Region.group(2, geometry.nbytes(2))
    exchange = PeerExchange(regions[0], geometry)
    nope, rope = torch.zeros(5, 2, 32), torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="5 tokens; this exchange holds 1 to 4"):
        exchange.gather(nope, rope)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        exchange.gather(nope[:2], rope[:2].mT.contiguous().mT)
    partial, lens, starts = torch.zeros(2, 4, 32), torch.ones(2), torch.arange(3)
    with pytest.raises(ValueError, match="LSE of shape"):
        exchange.merge(partial, torch.zeros(4, 2), lens, starts)
    with pytest.raises(ValueError, match="2 starts of 2 requests; 3 are needed"):
        exchange.merge(partial, torch.zeros(2, 4), lens, starts[:2])
    with pytest.raises(ValueError, match="17 ranks; the flags of a block hold 16"):
        PeerExchange(Region.group(17, geometry.nbytes(17))[0], geometry)
    with pytest.raises(ValueError, match="bytes"):
        PeerExchange(Region.group(2, 64)[0], geometry)


def test_rows_that_do_not_begin_on_16_bytes_are_copied_first() -> None:
    rows = torch.randn(3, 2, 40).bfloat16()
    assert aligned(rows) is rows
    odd = rows[..., 1:33]
    copy = aligned(odd)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, odd) and copy is not odd


def test_an_exchange_is_built_whatever_the_default_device_is() -> None:
    """vLLM builds its layers under `torch.device("cuda")`; only what is meant to lie there may."""
    geometry = Geometry(2, 32, 8, torch.float32, torch.float32, max_tokens=4)
    regions = Region.group(2, geometry.nbytes(2))
    with torch.device("meta"):
        exchange = PeerExchange(regions[0], geometry)
    own = regions[0].own
    assert exchange.deadline.report.device == own.device
    for table in (exchange.bases, exchange.state):
        # Inside the region: what vLLM's sleep mode discards, they would not outlive.
        assert 0 < table.data_ptr() - own.data_ptr() <= own.numel() - table.nbytes
    assert exchange.bases.tolist() == [peer.data_ptr() for peer in regions[0].peers]
    assert exchange.deadline.reported.tolist() == [0, 0, 0, 0]


def test_a_timeout_names_rank_step_and_epoch() -> None:
    geometry = Geometry(2, 32, 8, torch.float32, torch.float32, max_tokens=4, ubatches=2)
    exchange = PeerExchange(Region.group(4, geometry.nbytes(4))[1], geometry, timeout_s=5)
    block = 3 * FLAG_BYTES
    for part, step in (("slots", "query gather"), ("merge_flags", "merge")):
        exchange.deadline.reported[:] = [2 + 1, 6, 7, exchange.offset(part, 1) + block]
        with pytest.raises(RendezvousTimeout) as late:
            exchange.gather(torch.zeros(1, 2, 32), torch.zeros(1, 2, 8))
        assert str(late.value).startswith(
            f"rank 1: rank 2 did not come to {step} 7 of ubatch 1 within 5 s (its last was 6)"
        )


@pytest.mark.parametrize("asked", ["-1", "soon", "inf"])
def test_a_timeout_that_is_not_a_number_of_seconds_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv(TIMEOUT, asked)
    with pytest.raises(UserError, match=f"{TIMEOUT}={asked!r}"):
        limit_s(TIMEOUT, 600)


@pytest.mark.parametrize("asked", ["0", "-1", "many"])
def test_a_number_of_tokens_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    from kimi_k3_serve.attention.peer import MAX_TOKENS, max_tokens

    monkeypatch.setenv(MAX_TOKENS, asked)
    with pytest.raises(UserError, match=f"{MAX_TOKENS}={asked!r} is not a number of tokens"):
        max_tokens(None)


def test_ubatches_share_no_byte() -> None:
    geometry = Geometry(2, 32, 8, torch.float32, torch.bfloat16, max_tokens=4, ubatches=3)
    exchange = PeerExchange(Region.group(2, geometry.nbytes(2))[0], geometry)
    spans = sorted(
        (exchange.offset(name, ubatch), exchange.offset(name, ubatch) + size)
        for ubatch in range(3)
        for name, (_, size) in exchange.parts.items()
        if size
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= geometry.nbytes(2)
