# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_k3_serve.cli import main
from kimi_k3_serve.projection import b12x_row, gather, shard
from kimi_k3_serve.projection.exchange import MAX_ROWS, Geometry, PeerGather, PeerProjection
from kimi_k3_serve.symmetric import Connection, Region, agreement

WIDTHS = (shard.Q_A, shard.KV_A)
WORLDS = (1, 2, 4, 8, 16)


def columns(logical: torch.Tensor, widths: Sequence[int], rank: int, world_size: int) -> torch.Tensor:
    """What `rank` computes: its columns of each part, side by side."""
    parts = logical.split(list(widths), dim=1)
    return torch.cat([part.chunk(world_size, dim=1)[rank] for part in parts], dim=1)


class Group:
    """A coordinator that already knows what every rank would send."""

    def __init__(self, everyone: list[torch.Tensor]) -> None:
        self.everyone, self.world_size, self.calls = everyone, len(everyone), 0

    def all_gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        assert local.is_contiguous() and any(local.shape == one.shape for one in self.everyone)
        self.calls += 1
        return torch.cat(self.everyone, dim=dim)


@pytest.mark.parametrize("world_size", WORLDS)
def test_shards_of_a_projection_restored_are_the_replicated_projection(world_size: int) -> None:
    """Whole numbers: every order of summation is exact."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (5, 64), generator=generator).float()
    weight = torch.randint(-8, 9, (sum(WIDTHS), 64), generator=generator).float()
    replicated = x @ weight.T
    local = shard.local_widths(WIDTHS, world_size)
    outputs = [x @ columns(weight.T, WIDTHS, rank, world_size) for rank in range(world_size)]
    assert all(output.shape == (5, sum(local)) for output in outputs)
    assert torch.equal(shard.restore(torch.stack(outputs), local), replicated)
    if world_size > 1:  # rank-major is another order
        assert not torch.equal(torch.cat(outputs, dim=1), replicated)


@pytest.mark.parametrize("world_size", WORLDS)
def test_sharded_float32_differs_by_rounding_alone(world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 512, generator=generator), torch.randn(sum(WIDTHS), 512, generator=generator)
    outputs = [x @ columns(weight.T, WIDTHS, rank, world_size) for rank in range(world_size)]
    found = shard.restore(torch.stack(outputs), shard.local_widths(WIDTHS, world_size))
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("world_size", "width", "padded"), [(8, 264, 264), (16, 132, 136), (2, 1056, 1056)])
def test_a_row_is_padded_to_the_quantum(world_size: int, width: int, padded: int) -> None:
    assert sum(shard.local_widths(WIDTHS, world_size)) == width
    assert shard.padded(width, b12x_row.QUANTUM) == padded


@pytest.mark.parametrize(("world_size", "words"), [(5, "1536 columns over 5"), (128, "576 columns over 128")])
def test_a_width_that_does_not_divide_is_a_configuration_error(world_size: int, words: str) -> None:
    with pytest.raises(shard.ShardError, match=words) as error:
        shard.local_widths(WIDTHS, world_size)
    assert "\n" not in str(error.value) and "unset VLLM_KIMI_SHARD_QKV_A" in str(error.value)


def test_a_shard_must_not_begin_inside_a_block_of_scales() -> None:
    assert shard.local_widths((1536, 512), 2, block=128) == (768, 256)
    assert shard.local_widths(WIDTHS, 1, block=128) == WIDTHS
    with pytest.raises(shard.ShardError, match="288 columns a rank, which cuts a quantisation block of 128"):
        shard.local_widths(WIDTHS, 2, block=128)


def test_weight_memory() -> None:
    assert shard.weight_bytes() == 24 * 2112 * 7168 * 2
    assert shard.saved_gib(16) == pytest.approx(0.634, abs=5e-4)
    assert shard.saved_gib(1) == 0
    assert shard.saved_gib(2, layers=8) == pytest.approx(8 * 1056 * 7168 * 2 / 2**30)


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        ("rtx6000-16", "# latent projections in column shards: 0.634 GiB a GPU less than replicated"),
        ("b300-8", ""),
    ],
)
def test_explain_says_what_sharding_saves(
    profile: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = "tp16-dcp8" if profile == "rtx6000-16" else "dcp8"
    assert main(["explain", "--profile", profile, "--topology", topology, "--model", "m/m"]) == 0
    printed = capsys.readouterr().out
    assert line in printed and ("latent projections" in printed) == bool(line)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv(shard.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(shard.SWITCH, value)
    assert shard.enabled() is on


def test_an_unknown_switch_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shard.SWITCH, "yes")
    with pytest.raises(shard.ShardError, match="VLLM_KIMI_SHARD_QKV_A='yes' is not known"):
        shard.enabled()
    monkeypatch.setenv(gather.SWITCH, "nccl")
    with pytest.raises(gather.ProjectionGatherError, match="use one of auto, b12x, peer, collective"):
        gather.asked()


@pytest.mark.parametrize(("text", "rows"), [(None, 2), ("0", 0), ("8", 8)])
def test_rows_of_a_product(monkeypatch: pytest.MonkeyPatch, text: str | None, rows: int) -> None:
    monkeypatch.delenv(gather.PRODUCT_ROWS, raising=False)
    if text is not None:
        monkeypatch.setenv(gather.PRODUCT_ROWS, text)
    assert gather.product_rows() == rows


@pytest.mark.parametrize("text", ["9", "-1", "two", ""])
def test_rows_of_a_product_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(gather.PRODUCT_ROWS, text)
    with pytest.raises(gather.ProjectionGatherError, match="is not a whole number of rows from 0 to 8"):
        gather.product_rows()


@pytest.mark.parametrize(("rows", "built"), [("0", False), ("3", True)])
def test_the_product_is_built_for_its_rows(
    monkeypatch: pytest.MonkeyPatch, alone: Any, rows: str, built: bool
) -> None:
    monkeypatch.setenv(gather.PRODUCT_ROWS, rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(PeerProjection, "warm_up", lambda self, dtype: alone.made.append(self.geometry.rows))
    way = gather.select(alone, WIDTHS, GPU, inputs=7168).way
    assert isinstance(way, gather.PeerRows) and (way.product is not None) == built
    assert alone.made == (["warm", 3] if built else ["warm"])


def test_which_coordinator_gathers() -> None:
    tensor_parallel = SimpleNamespace(ranks=[0, 1, 2, 3])
    for ranks, same in (([0, 1, 2, 3], True), ([0, 1], False), ([1, 0, 2, 3], False), ([2, 3, 0, 1], False)):
        context_parallel = SimpleNamespace(ranks=ranks)
        found = gather.coordinator(tensor_parallel, context_parallel)
        assert found is (context_parallel if same else tensor_parallel)
    assert gather.coordinator(tensor_parallel, None) is tensor_parallel


class Recorder:
    """A way that takes what its rule says and notes it."""

    rows = 1

    def __init__(self, logical: torch.Tensor) -> None:
        self.logical, self.calls = logical, 0

    def takes(self, local: torch.Tensor) -> bool:
        return local.shape[0] == 1

    def merged(self, local: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.logical


@pytest.mark.parametrize(
    ("rows", "dtype", "fast"),
    [
        (1, torch.bfloat16, True),
        (1, torch.float16, True),
        (1, torch.float32, False),
        (2, torch.bfloat16, False),
        (700, torch.float16, False),
    ],
)
def test_who_takes_the_way_and_who_the_all_gather(rows: int, dtype: torch.dtype, fast: bool) -> None:
    logical = torch.arange(rows * sum(WIDTHS)).view(rows, -1).remainder(251).to(dtype)
    everyone = [columns(logical, WIDTHS, rank, 4) for rank in range(4)]
    group, way = Group(everyone), Recorder(logical)
    source = gather.LatentGather(group, WIDTHS, gather.Choice("peer", "", way))
    beside = torch.cat([everyone[2], everyone[2]], dim=1)[:, : source.local_width]
    assert torch.equal(source(beside), logical)
    assert (way.calls, group.calls) == ((1, 0) if fast else (0, 1))


def test_one_rank_is_the_identity() -> None:
    group = Group([torch.zeros(1, 1)])
    local = torch.randn(3, sum(WIDTHS))
    assert gather.LatentGather(group, WIDTHS, gather.Choice("identity", "", None))(local) is local
    pair = gather.PairedGather(group, None)(local, local[:, :8])
    assert pair[0] is local and group.calls == 0


def test_a_worker_proves_what_its_layers_hold() -> None:
    group = Group([torch.zeros(1, 1)] * 2)
    latents = gather.LatentGather(group, WIDTHS, gather.Choice("peer", "why", None))
    gated = SimpleNamespace(fused_qkv_a_g_proj=SimpleNamespace(latents=latents))
    plain = SimpleNamespace(fused_qkv_a_g_proj=None, fused_qkv_a_proj=SimpleNamespace(latents=latents))
    stock = SimpleNamespace(fused_qkv_a_g_proj=SimpleNamespace())
    reason = "2 of 2 MLA layers over 2 ranks, gathered over peer (why)"
    assert gather.inspect([gated, plain]) == {"active": True, "reason": reason}
    assert not gather.inspect([gated, stock])["active"]
    assert not gather.inspect([stock])["active"] and not gather.inspect([])["active"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group whose other ranks answer as this one does."""
    monkeypatch.delenv(gather.USE_B12X, raising=False)
    monkeypatch.delenv(gather.SWITCH, raising=False)

    monkeypatch.setattr(agreement, "everyone", lambda group, value: [value] * 2)
    made: list[str] = []
    monkeypatch.setattr(PeerGather, "warm_up", lambda self: made.append("warm"))

    def connect(
        nbytes: int, group: Any, device: Any, among: Any, *, host_group: Any, against: str | None = None
    ) -> Connection:
        if against:
            return Connection(None, None, {among[0]: f"rank 0: {against}"})
        return Connection(among[0], Region.group(2, nbytes)[0], {})

    monkeypatch.setattr(gather, "connect", connect)

    class Row:
        rows = 1

        def __init__(self, *arguments: Any) -> None:
            made.append("b12x")

        def warm_up(self) -> None:
            made.append("b12x warm")

    monkeypatch.setattr(gather.b12x_row, "B12xRow", Row)
    return SimpleNamespace(world_size=2, cpu_group=None, device_group=None, made=made)


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("switch", "use_b12x", "capability", "installed", "name", "words"),
    [
        ("auto", "0", (9, 0), True, "peer", "b12x: rank 0: VLLM_USE_B12X_DCP_A2A is not 1"),
        ("auto", "1", (9, 0), True, "peer", "b12x runs on SM120 and SM121, this GPU is SM90"),
        ("auto", "1", (12, 0), True, "b12x", "KIMI_K3_PROJECTION_GATHER=auto"),
        ("auto", "1", (12, 0), False, "collective", "install b12x==1.5.1"),
        (
            "auto",
            "0",
            (12, 1),
            True,
            "collective",
            "the peer gather is for SM90 and SM100, this GPU is SM121",
        ),
        ("b12x", "0", (12, 0), True, "b12x", "KIMI_K3_PROJECTION_GATHER=b12x"),
        ("peer", "1", (10, 0), True, "peer", "KIMI_K3_PROJECTION_GATHER=peer"),
        ("collective", "1", (12, 0), True, "collective", "KIMI_K3_PROJECTION_GATHER=collective"),
    ],
)
def test_the_way_and_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    alone: Any,
    switch: str,
    use_b12x: str,
    capability: tuple[int, int],
    installed: bool,
    name: str,
    words: str,
) -> None:
    monkeypatch.setenv(gather.SWITCH, switch)
    monkeypatch.setenv(gather.USE_B12X, use_b12x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(b12x_row.importlib.util, "find_spec", lambda name: object() if installed else None)
    choice = gather.select(alone, WIDTHS, GPU)
    assert choice.name == name and words in choice.reason
    assert (choice.way is None) == (name == "collective")
    assert alone.made == {"b12x": ["b12x", "b12x warm"], "peer": ["warm"], "collective": []}[name]
    assert choice.way is None or choice.way.rows == {"b12x": 1, "peer": 8}[name]


@pytest.mark.parametrize(
    ("switch", "capability", "words"),
    [
        ("b12x", (9, 0), "KIMI_K3_PROJECTION_GATHER=b12x cannot work here: rank 0: b12x runs on SM120"),
        (
            "peer",
            (12, 0),
            "KIMI_K3_PROJECTION_GATHER=peer cannot work here: rank 0: the peer gather is for SM90",
        ),
    ],
)
def test_a_way_asked_for_that_cannot_work_stops(
    monkeypatch: pytest.MonkeyPatch, alone: Any, switch: str, capability: tuple[int, int], words: str
) -> None:
    monkeypatch.setenv(gather.SWITCH, switch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(gather.ProjectionGatherError, match=words):
        gather.select(alone, WIDTHS, GPU)


def test_widths_that_the_peer_gather_cannot_cut_take_the_all_gather(
    monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = gather.select(alone, (1536, 36), GPU)
    assert choice.name == "collective" and "36 bytes a row and rank are not a multiple of 8" in choice.reason
    told: list[str] = []
    monkeypatch.setattr(gather.logger, "warning", lambda text, *words: told.append(text % words))
    pair = gather.select_pair(alone, 64, 12, GPU)
    assert pair.peer is None and "12 bytes" in pair.reason and pair.reason in told[0]


def test_what_the_peer_gather_takes() -> None:
    geometry = Geometry(64, 16)
    source = PeerGather(Region.group(2, geometry.nbytes(2))[0], geometry)
    rows = torch.zeros(MAX_ROWS + 1, 48, dtype=torch.bfloat16)
    assert source.takes(rows[:1, :40]) and source.takes(rows[:MAX_ROWS, 4:44])
    assert not source.takes(rows[:, :40])  # nine rows
    assert not source.takes(rows[:0, :40])
    assert not source.takes(rows[:2, 1:41])  # begins inside a unit
    assert not source.takes(rows[:2].T[:40].T.mT)
    assert not source.takes(torch.zeros(2, 41, dtype=torch.bfloat16)[:, :40])  # rows begin inside one
    assert not source.takes(rows[:1, :40].to("meta")) and not source.takes(rows[0, :40])
    with pytest.raises(ValueError, match="rows of 76 bytes; this gather moves 80"):
        source.merged(rows[:1, :38])
    with pytest.raises(ValueError, match="this gather moves 2 rows of 16 bytes"):
        source.pair(rows[:2, :32], rows[:1, :8])
    with pytest.raises(ValueError, match=f"bytes; {5120 + 2 * 8 + 8 * 10 * 4} are needed"):
        PeerGather(Region.group(2, 64)[0], geometry)
    with pytest.raises(ValueError, match="12 bytes a row and rank are not a multiple of 8"):
        PeerGather(Region.group(2, 8192)[0], Geometry(8, 12))


def test_buffers_lie_beside_the_region_whatever_the_default_device() -> None:
    """vLLM builds its layers with the GPU as the default device."""
    geometry = Geometry(64, 16)
    region = Region.group(2, geometry.nbytes(2))[0]
    with torch.device("meta"):
        built = (PeerGather(region, geometry), PeerProjection(region, geometry, inputs=96))
    for source in built:  # and inside it: what vLLM's sleep mode discards, they would not outlive
        for table in (source.bases, source.epochs):
            assert table.device == region.own.device
            begin = table.data_ptr() - region.own.data_ptr()
            assert 0 < begin <= region.own.numel() - table.nbytes
        assert source.bases.tolist() == [peer.data_ptr() for peer in region.peers] and not source.epochs.any()


def test_what_the_product_takes() -> None:
    geometry = Geometry(64, 16, rows=2)
    source = PeerProjection(Region.group(2, geometry.nbytes(2))[0], geometry, inputs=96)
    assert source.step == 32
    x, weight = torch.zeros(3, 96, dtype=torch.bfloat16), torch.zeros(40, 96, dtype=torch.bfloat16)
    assert source.takes(x[:1], weight) and source.takes(x[1:], weight)
    assert not source.takes(x, weight)  # three rows
    assert not source.takes(x[:1].half(), weight) and not source.takes(x[:1].float(), weight.float())
    assert not source.takes(x[:1, :80], weight) and not source.takes(x[:1], weight[:36])
    assert not source.takes(x[:1], torch.zeros(96, 40, dtype=torch.bfloat16).T)
    assert not source.takes(
        torch.zeros(2, 104, dtype=torch.bfloat16)[:, :96], weight
    )  # rows begin between 16 elements
    assert not source.takes(x[:1].to("meta"), weight.to("meta"))


@pytest.mark.parametrize(("rows", "warmed"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_every_kernel_of_the_product_is_loaded(
    monkeypatch: pytest.MonkeyPatch, rows: int, warmed: list[int]
) -> None:
    geometry = Geometry(64, 16, rows=rows)
    source = PeerProjection(Region.group(2, geometry.nbytes(2))[0], geometry, inputs=96)
    seen: list[int] = []
    monkeypatch.setattr(PeerProjection, "project", lambda self, x, weight: seen.append(x.shape[0]))
    source.warm_up(torch.bfloat16)
    assert seen == warmed


def test_a_product_goes_with_the_gather_or_before_it() -> None:
    logical = torch.arange(2 * sum(WIDTHS)).view(2, -1).remainder(251).bfloat16()
    group = Group([columns(logical, WIDTHS, rank, 4) for rank in range(4)])
    rows = gather.PeerRows(SimpleNamespace(geometry=Geometry(8, 8), takes=lambda local: False), lambda: 3)  # type: ignore[arg-type]
    source = gather.LatentGather(group, WIDTHS, gather.Choice("peer", "", rows))
    hidden, weight = torch.zeros(2, 8), torch.zeros(source.local_width, 8)
    products: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products.append((x, w))
        return group.everyone[1]

    assert torch.equal(source.project(hidden, weight, gemm), logical)
    assert len(products) == 1 and group.calls == 1 and products[0] == (hidden, weight)

    class Product:
        def takes(self, x: torch.Tensor, w: torch.Tensor) -> bool:
            return x is hidden and w is weight

        def project(self, x: torch.Tensor, w: torch.Tensor, ubatch: int) -> torch.Tensor:
            assert ubatch == 3
            return logical

    rows.product = Product()  # type: ignore[assignment]
    assert source.project(hidden, weight, gemm) is logical
    assert len(products) == 1 and group.calls == 1


def test_the_paired_fallback_moves_bits() -> None:
    scores = torch.randint(-(2**31), 2**31, (9, 16)).to(torch.int32).view(torch.float32)
    hidden = torch.randn(9, 32).bfloat16()
    for part in (scores, hidden):
        bits = {4: torch.int32, 2: torch.int16}[part.itemsize]
        group = Group([half.contiguous() for half in part.chunk(2, dim=1)])
        found = gather.PairedGather(group, None).alone(part.chunk(2, dim=1)[0])
        assert torch.equal(found.view(bits), part.view(bits))


class Pool:
    """b12x's pool as far as the row uses it: rank-major heads of a multiple of 8 elements."""

    def __init__(self, everyone: list[torch.Tensor], **arguments: Any) -> None:
        self.everyone, self.arguments, self.prepared, self.captures = everyone, arguments, 0, 0
        assert arguments["head_dim"] % 8 == 0 and arguments["max_batch_size"] == 1

    def for_stream(self) -> str:
        return "channel"

    def capture(self) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def scope() -> Any:
            self.captures += 1
            yield

        return scope()

    def all_gather_heads(self, local: torch.Tensor, out: torch.Tensor, *, plan: Any) -> torch.Tensor:
        width = self.arguments["query_head_dim"]
        assert plan == "plan" and local.shape == (1, 1, width) and local.is_contiguous()
        for rank, row in enumerate(self.everyone):
            head = torch.full((width,), torch.nan, dtype=local.dtype)  # padding that must never be seen
            head[: row.shape[1]] = row[0]
            out[0, rank] = head
        return out


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row_over_b12x(monkeypatch: pytest.MonkeyPatch, world_size: int, dtype: torch.dtype) -> None:
    """Padding, stripping and order, on a stand-in for the collective; one plan a dtype, capture inside the scope."""
    logical = torch.randn(1, sum(WIDTHS)).to(dtype)
    everyone = [columns(logical, WIDTHS, rank, world_size) for rank in range(world_size)]
    pool: list[Pool] = []

    class Pools:
        @staticmethod
        def from_exchange_group(**arguments: Any) -> Pool:
            assert arguments["total_heads"] == world_size and arguments["exchange_group"] == "cpu group"
            pool.append(Pool(everyone, **arguments))
            return pool[0]

    pcie = ModuleType("b12x.comm.pcie")
    pcie.DcpAllToAllPool = Pools  # type: ignore[attr-defined]
    pcie.query_from_runtime = lambda channel, surface, call: (channel, surface)  # type: ignore[attr-defined]
    pcie.plan = lambda query, runtime: "plan"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "b12x.comm.pcie", pcie)
    prepared: list[Any] = []
    monkeypatch.setattr(b12x_row.B12xRow, "prepare", lambda self, *arguments: prepared.append(arguments))
    group = SimpleNamespace(world_size=world_size, cpu_group="cpu group")
    source = b12x_row.B12xRow(group, shard.local_widths(WIDTHS, world_size), torch.device("cpu"))
    assert source.width == {2: 1056, 4: 528, 8: 264, 16: 136}[world_size]
    local = torch.cat([everyone[0], everyone[0]], dim=1)[:, : everyone[0].shape[1]]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    source.warm_up()
    assert len(prepared) == 2  # none is left to the capture
    for capturing in (False, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert source.takes(local) and torch.equal(source.merged(local), logical)
    assert len(prepared) == 2 and pool[0].captures == 1
    assert not source.takes(torch.zeros(2, local.shape[1], dtype=dtype))


@pytest.mark.parametrize(
    ("device", "world_size", "words"),
    [("cpu", 2, "between GPUs, not cpu"), ("cuda", 3, r"between \(2, 4, 8, 16\) ranks, not 3")],
)
def test_where_b12x_cannot_gather(
    monkeypatch: pytest.MonkeyPatch, device: str, world_size: int, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(b12x_row.importlib.util, "find_spec", lambda name: object())
    found = b12x_row.objection(torch.device(device), world_size)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)
