# SPDX-License-Identifier: Apache-2.0
import pytest

from kimi_k3_serve.attention import ownership
from kimi_k3_serve.patch import Edit, edit_function, edited
from kimi_k3_serve.source_lock import SourceLockError, digest, locked

NAME = "vllm.v1.attention.backends.mla.triton_mla.TritonMLAImpl.forward_mqa"


def test_an_edit_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(SourceLockError, match="forward_mqa holds 0 times"):
        edited(NAME, [Edit("no such text", "")])
    with pytest.raises(SourceLockError, match=r"forward_mqa holds [2-9] times"):
        edited(NAME, [Edit("q.dtype", "torch.float32")])


def test_upstream_keeps_its_own_function() -> None:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    from kimi_k3_serve.attention.peer_triton import Float32LSETritonMLAImpl

    before = digest(NAME)
    ours, upstream = Float32LSETritonMLAImpl.forward_mqa, TritonMLAImpl.forward_mqa
    assert ours.__wrapped__ is upstream and digest(NAME) == before
    # Its LSE is float32, not of the queries' dtype; nothing else has changed.
    assert ours.__code__.co_names.count("float32") == 1
    assert len(ours.__code__.co_code) != len(upstream.__code__.co_code)


def test_every_edited_function_is_in_the_source_lock() -> None:
    assert set(ownership.EDITS) <= set(locked())


def test_two_lists_of_edits_of_one_function_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    monkeypatch.setattr(TritonMLAImpl, "forward_mqa", TritonMLAImpl.forward_mqa)  # put back afterwards
    edits = [Edit("lse = torch.zeros(", "lse = torch.empty(")]
    edit_function(NAME, edits)
    edit_function(NAME, list(edits))
    with pytest.raises(SourceLockError, match="forward_mqa is edited twice, differently"):
        edit_function(NAME, [Edit("lse = torch.zeros(", "lse = torch.ones(")])
