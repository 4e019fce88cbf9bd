# SPDX-License-Identifier: Apache-2.0
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import parallel_state

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.publish import choice, hook, verify
from kimi_k3_serve.publish.choice import Choice, PrefillKVError
from kimi_k3_serve.publish.chunks import upload
from kimi_k3_serve.symmetric import agreement
from kimi_k3_serve.symmetric.transport import Connection


def test_the_replaced_method_equals_stock_bit_for_bit() -> None:
    """Through every transport of the CPU, with scaled e4m3, in runs of four tokens and in a sparse layer; and the check
    of a running engine finds one wrong bit."""
    cases = ["2:auto:fp32", "4:shared:bf16", "2:collective:bf16", "2:stock:fp32", "2:verify:bf16"]
    cases += ["4:auto:fp8", "2:collective:fp8", "2:auto:fp8-queries", "2:verify:fp8", "2:auto:sparse"]
    cases += ["4:auto:interleave4", "2:collective:interleave4", "2:verify:sparse"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("prefill_ranks.py")), *cases],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert [line for line in done.stdout.splitlines() if line in cases] == cases, done.stderr[-3000:]


def test_a_layer_that_gathers_no_context_has_no_publisher() -> None:
    """A sparse one whose backend has no dense prefill."""

    class Builder:
        def __init__(self, *arguments: Any) -> None:
            self.dcp_world_size, self._prefill_backend, self.dcp_manager = 2, None, SimpleNamespace()

    Builder.__init__ = hook.choosing(Builder.__init__)  # type: ignore[method-assign]
    assert not vars(Builder(None, ["layer"], None).dcp_manager)


def builder(cache_dtype: str | None, device: str = "cpu") -> Any:
    """What `choice_for` reads of a metadata builder."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(num_ubatches=0),
    )
    return SimpleNamespace(
        vllm_config=config,
        device=device,
        chunked_prefill_workspace_size=32,
        mla_dims=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        kv_cache_spec=SimpleNamespace(cache_dtype_str=cache_dtype),
    )


def in_a_group(monkeypatch: pytest.MonkeyPatch, *, others: Callable[[Any], Any] = lambda mine: mine) -> None:
    """This process as rank 0 of two; rank 1 says `others` of what this one says."""
    group = SimpleNamespace(unique_name="dcp:0", device_group=None, cpu_group=None)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: group)
    monkeypatch.setattr(agreement, "everyone", lambda group, mine: [mine, others(mine)])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(hook, "_choices", {})


def test_the_layers_own_cache_dtype_counts_and_all_choices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--kv-cache-dtype-skip-layers`: some layers keep another cache than the engine's."""
    made = []

    def select(**arguments: Any) -> Choice:
        made.append(arguments["cache_dtype"])
        transport = "shared" if len(made) == 1 else "stock"
        return Choice(transport, f"reason {len(made)}", None, scaled=False, verified=False)

    in_a_group(monkeypatch)
    monkeypatch.setattr(hook, "select", select)
    for cache_dtype in ("fp8", "auto", None, "auto"):
        hook.choice_for(builder(cache_dtype))
    assert made == ["fp8", "auto"]
    assert hook.state() == {"transport": "shared, stock", "reason": "reason 1, reason 2"}


REASONS = {"multicast": "rank 0: switched off", "peer": "rank 1: no access to GPU 0", "shared": "rank 0: no"}


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetric memory of which no transport works on all ranks."""

    def connect(nbytes: int, group: Any, device: torch.device, among: Any, **more: Any) -> Connection:
        return Connection(None, None, {name: REASONS[name] for name in among})

    monkeypatch.setattr(choice, "connect", connect)


@pytest.mark.parametrize(("value", "device"), [("multicast", "cuda"), ("peer", "cuda"), ("shared", "cpu")])
def test_a_forced_transport_that_fails_stops_the_start(
    value: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_group(monkeypatch)
    refusing(monkeypatch)
    monkeypatch.setenv(choice.SWITCH, value)
    message = f"^KIMI_K3_PREFILL_KV={value} cannot work here: {REASONS[value]}; use KIMI_K3_PREFILL_KV=auto$"
    with pytest.raises(PrefillKVError, match=message):
        hook.choice_for(builder("auto", device))


def test_auto_falls_to_the_collective_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_group(monkeypatch)
    refusing(monkeypatch)
    monkeypatch.delenv(choice.SWITCH, raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm")
    reasons = "multicast: rank 0: switched off; peer: rank 1: no access to GPU 0; shared: rank 0: no"
    for _ in range(2):  # told once, not by every builder
        made = hook.choice_for(builder("auto"))
    assert (made.transport, made.reason) == ("collective", reasons)
    assert made.source is not None and made.source.transport == "collective"
    assert caplog.messages == [f"Prefill KV by collective for chunks of up to 32 rows ({reasons})"]
    assert hook.state() == {"transport": "collective", "reason": reasons}


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (("stock", False), r"KIMI_K3_PREFILL_KV differs between ranks: \['auto', 'stock'\]"),
        (("auto", True), r"KIMI_K3_VERIFY_PREFILL_KV differs between ranks: \[False, True\]"),
    ],
)
def test_ranks_must_be_configured_alike(
    theirs: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_group(monkeypatch, others=lambda mine: theirs)
    with pytest.raises(PrefillKVError, match=f"{message}; set it alike for every worker"):
        hook.choice_for(builder("auto"))


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "fp8_e5m2"])
def test_caches_of_other_layouts_are_left_to_vllm(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_group(monkeypatch)
    made = hook.choice_for(builder(cache_dtype))
    assert (made.transport, made.source) == ("stock", None)
    assert made.reason == f"a KV cache of {cache_dtype} is left to vLLM's own all-gather"
    for value in ("shared", "collective"):
        monkeypatch.setenv(choice.SWITCH, value)
        monkeypatch.setattr(hook, "_choices", {})
        with pytest.raises(
            PrefillKVError, match=f"^{choice.SWITCH}={value} cannot carry a KV cache of {cache_dtype};"
        ):
            hook.choice_for(builder(cache_dtype))


class Copies(TorchDispatchMode):
    """Counts copies between tensors."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_all_maps_of_a_batch_go_to_the_device_in_one_copy() -> None:
    """prefill_ranks.py counts that a batch's layers share them."""
    batch = [([3, 1], [[3, 2], [1, 0]], [0, 0]), ([4], [[7, 7]], [3])]
    with Copies() as copies:
        chunks = upload(batch, rank=1, world_size=2, device=torch.device("meta"), tiles=True, gathered=True)
    assert [chunk.num_rows for chunk in chunks] == [6, 8] and copies.made == 1


@pytest.mark.parametrize(
    ("value", "device", "message"),
    [
        ("nvls", "cpu", "'nvls' is not known; use one of auto, multicast, peer, shared, collective, stock"),
        ("peer", "cpu", "KIMI_K3_PREFILL_KV=peer cannot work on cpu; use KIMI_K3_PREFILL_KV=auto"),
        ("multicast", "cpu", "cannot work on cpu"),
        ("shared", "cuda", "cannot work on cuda"),
    ],
)
def test_what_a_device_cannot_do_is_refused_at_once(
    value: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(choice.SWITCH, value)
    with pytest.raises(PrefillKVError, match=message):
        choice.asked(device)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_out_is_a_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.TIMEOUT, text)
    with pytest.raises(UserError, match=f"'{text}' is not a number of seconds; give 0 .no limit. or more"):
        choice.timeout_s()


def test_switches_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verify.SWITCH, "yes")
    with pytest.raises(Exception, match="KIMI_K3_VERIFY_PREFILL_KV='yes' is not known; use 0 or 1"):
        verify.asked()


def test_kernels_are_loaded_once_the_cache_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first metadata that is built after the KV cache was bound; never twice."""
    loaded: list[Any] = []
    monkeypatch.setattr(hook, "load", lambda *arguments: loaded.append(arguments))
    layer = SimpleNamespace(kv_cache=torch.empty(0))
    builder = SimpleNamespace(unloaded=layer, dcp_manager=SimpleNamespace(prefill_kv="choice", group="group"))
    build = hook.loading(lambda self, value: value)
    assert build(builder, 1) == 1 and not loaded
    layer.kv_cache = torch.empty(2, 4, 576)
    assert [build(builder, value) for value in (2, 3)] == [2, 3]
    assert loaded == [("choice", layer.kv_cache, "group")]
