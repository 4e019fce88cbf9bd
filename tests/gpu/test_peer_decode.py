# SPDX-License-Identifier: Apache-2.0
"""The peer kernels on one GPU: W ranks are W sets of buffers and W streams, whose launches spin on each other.

What this shows: the kernels, the rendezvous and the arithmetic, with real concurrency. What it cannot show: stores
over NVLink, and time. Needs PyTorch and Triton only.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from kimi_k3_serve.attention.peer_exchange import Geometry, PeerExchange
from kimi_k3_serve.symmetric.region import Region, view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0 or later",
    ),
]

LATENT, ROPE, SCALE = 512, 64, 192**-0.5
FUTURE = 1 << 62  # an epoch
BLOCKS = (
    64  # of the merges of all ranks together: with the gathers' they leave half of the multiprocessors idle
)
TIMEOUT_S = 20.0  # a wait that is longer ends in a trap that names the rank, not in a test that stands still


class Ranks:
    """W ranks of one process on one GPU."""

    def __init__(self, world_size: int, geometry: Geometry) -> None:
        regions = Region.group(world_size, geometry.nbytes(world_size), "cuda")
        self.geometry, self.world_size = geometry, world_size
        self.exchanges = [
            PeerExchange(region, geometry, blocks=BLOCKS // world_size, timeout_s=TIMEOUT_S)
            for region in regions
        ]
        self.streams = [torch.cuda.Stream() for _ in regions]
        torch.cuda._sleep(1)  # loads its kernel: see `alone`

    def each(
        self, work: Callable[[int, PeerExchange], torch.Tensor], late: int | None = None
    ) -> list[torch.Tensor]:
        """Run `work` for all ranks at once, each on its stream; `late` starts about a millisecond after the others."""
        torch.cuda.synchronize()
        results = []
        for rank, (exchange, stream) in enumerate(zip(self.exchanges, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                if rank == late:
                    torch.cuda._sleep(2_000_000)
                results.append(work(rank, exchange))
        torch.cuda.synchronize()
        return results

    def alone(self, launch: Callable[[int, PeerExchange], object]) -> None:
        """Launch one rank after another, as if everything that it waits for had come; then begin at epoch 0 again.

        Loading a kernel and a graph's first launch may want an idle GPU, which ranks that wait for each other are
        not: slots that are full and flags far in the future let a lone rank through.
        """
        for rank, exchange in enumerate(self.exchanges):
            own = exchange.region.peers[rank]
            for part in ("slots", "merge_flags"):
                offset, size = exchange.parts[part]
                view(own, offset, (size // 8,), torch.int64).fill_(FUTURE)
            torch.cuda.synchronize()
            launch(rank, exchange)
            torch.cuda.synchronize()
        for exchange in self.exchanges:
            exchange.state.zero_()
            exchange.epochs.zero_()
            exchange.region.own[: self.geometry.ubatches * exchange.parts["end"][0]].zero_()
        torch.cuda.synchronize()

    def prime(self, tokens: int) -> None:
        """Compile and load every kernel that so many tokens need."""
        g = self.geometry

        def launch(rank: int, exchange: PeerExchange) -> None:
            query = torch.zeros(tokens, g.heads, g.latent + g.rope, dtype=g.query_dtype, device="cuda")
            gathered = exchange.gather(query[..., : g.latent], query[..., g.latent :])
            partial = torch.zeros(*gathered.shape[:2], g.latent, dtype=g.output_dtype, device="cuda")
            exchange.merge(partial, partial[..., 0].float(), *whole(tokens))

        self.alone(launch)


def whole(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """seq_lens and query_start_loc of requests of one token, none of whose shards is empty."""
    lens = torch.ones(tokens, dtype=torch.int32, device="cuda")
    return lens, torch.arange(tokens + 1, dtype=torch.int32, device="cuda")


def attend(query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's heads [H, L + P] over `rows` [N, L + P] in float64: output [H, L] and natural LSE [H]."""
    scores = SCALE * query.double() @ rows.double().T
    return torch.softmax(scores, -1) @ rows[:, :LATENT].double(), torch.logsumexp(scores, -1)


@pytest.fixture(params=[2, 4, 8])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param
    torch.cuda.empty_cache()


@pytest.mark.parametrize("batch", [1, 3, 8, 32, 64])
def test_decode_equals_float64_attention_over_the_whole_context(world_size: int, batch: int) -> None:
    """Ragged contexts from 1 to 200K tokens: gather, attend over each rank's shard, merge."""
    heads = 4
    generator = torch.Generator("cuda").manual_seed(batch)
    lengths = torch.logspace(0, 5.3, batch).long().tolist() if batch > 1 else [200_000]
    geometry = Geometry(heads, LATENT, ROPE, torch.bfloat16, torch.bfloat16, max_tokens=64)
    ranks = Ranks(world_size, geometry)
    ranks.prime(batch)
    queries = torch.randn(
        batch, world_size * heads, LATENT + ROPE, generator=generator, device="cuda"
    ).bfloat16()

    def gather(rank: int, exchange: PeerExchange) -> torch.Tensor:
        own = queries[:, rank * heads : (rank + 1) * heads]
        return exchange.gather(own[..., :LATENT], own[..., LATENT:])

    for gathered in ranks.each(gather, late=world_size - 1):
        assert torch.equal(gathered, queries)

    shape = (world_size, batch, world_size * heads)
    partials = torch.full((*shape, LATENT), torch.nan, dtype=torch.bfloat16, device="cuda")
    # The strides of FLASH_ATTN_MLA: [H, B] seen as [B, H]. An empty shard holds NaN everywhere.
    lses = torch.full((world_size, shape[2], batch), torch.nan, device="cuda").transpose(1, 2)
    lens = torch.zeros(world_size, batch, dtype=torch.int32, device="cuda")
    expected = torch.empty(batch, world_size * heads, LATENT, dtype=torch.float64, device="cuda")
    for i, length in enumerate(lengths):
        context = torch.randn(length, LATENT + ROPE, generator=generator, device="cuda").bfloat16()
        expected[i], _ = attend(queries[i], context)
        for rank in range(world_size):
            shard = context[rank::world_size]
            lens[rank, i] = len(shard)
            if len(shard):
                output, lse = attend(queries[i], shard)
                partials[rank, i], lses[rank, i] = output.bfloat16(), lse.float()
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")

    merged = ranks.each(
        lambda rank, exchange: exchange.merge(partials[rank], lses[rank], lens[rank], starts), late=0
    )
    for rank, output in enumerate(merged):
        reference = expected[:, rank * heads : (rank + 1) * heads]
        # Two roundings to BF16 (the partials, the result): each at most 2^-8 of the largest value in play.
        largest = partials[:, :, rank * heads : (rank + 1) * heads].float().nan_to_num().abs().amax((0, 3))
        error = (output.double() - reference).abs().amax(-1)
        assert (error <= 2.0**-7 * largest).all(), (rank, (error / largest).max())


def test_fp8_queries_are_gathered_byte_for_byte(world_size: int) -> None:
    heads, tokens = 12, 7
    geometry = Geometry(heads, LATENT, ROPE, torch.float8_e4m3fn, torch.bfloat16, max_tokens=8)
    ranks = Ranks(world_size, geometry)
    ranks.prime(tokens)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (tokens, world_size * heads, LATENT + ROPE)
    bits = torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)
    queries = bits.view(torch.float8_e4m3fn)

    def gather(rank: int, exchange: PeerExchange) -> torch.Tensor:
        own = queries[:, rank * heads : (rank + 1) * heads]
        return exchange.gather(own[..., :LATENT], own[..., LATENT:])

    for gathered in ranks.each(gather, late=1):
        assert torch.equal(gathered.view(torch.uint8), bits)


@pytest.mark.parametrize("late", [None, 0, 1])
def test_graph_replay_follows_its_inputs(world_size: int, late: int | None) -> None:
    """Each rank's gather, stand-in attention and merge in a CUDA graph, twice a graph; 30 replays, one rank late."""
    heads, tokens = 6, 2
    geometry = Geometry(heads, LATENT, ROPE, torch.bfloat16, torch.bfloat16, max_tokens=8)
    ranks = Ranks(world_size, geometry)
    ranks.prime(tokens)
    queries = torch.empty(tokens, world_size * heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    lses = torch.empty(world_size, tokens, world_size * heads, device="cuda")
    lens, starts = whole(tokens)

    def layer(rank: int, exchange: PeerExchange) -> torch.Tensor:
        own = queries[:, rank * heads : (rank + 1) * heads]
        gathered = exchange.gather(own[..., :LATENT], own[..., LATENT:])
        return exchange.merge((gathered[..., :LATENT] + rank).contiguous(), lses[rank], lens, starts)

    graphs, outputs = [], []
    for rank, exchange in enumerate(ranks.exchanges):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            outputs.append([layer(rank, exchange), layer(rank, exchange)])
        graphs.append(graph)
    ranks.alone(lambda rank, exchange: graphs[rank].replay())

    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(30):
        queries.copy_(torch.randn(queries.shape, generator=generator, device="cuda"))
        lses.copy_(3 * torch.randn(lses.shape, generator=generator, device="cuda"))
        lses[0, :, ::3] = -torch.inf

        def replay(rank: int, exchange: PeerExchange) -> torch.Tensor:
            graphs[rank].replay()
            return queries

        ranks.each(replay, late=late)
        weights = torch.softmax(lses.double(), 0)
        shards = torch.stack([(queries[..., :LATENT] + rank).double() for rank in range(world_size)])
        expected = (weights.unsqueeze(-1) * shards).sum(0)
        for rank, results in enumerate(outputs):
            for output in results:
                reference = expected[:, rank * heads : (rank + 1) * heads]
                torch.testing.assert_close(output.double(), reference, rtol=2**-7, atol=2**-7)
    for exchange in ranks.exchanges:
        assert exchange.state.tolist() == [[60, 0]]
        assert set(exchange.epochs.flatten().tolist()) == {0, 60}  # 0: blocks beyond two tokens
        offset, size = exchange.parts["slots"]
        assert not exchange.region.peers[exchange.rank][offset : offset + size].any()
