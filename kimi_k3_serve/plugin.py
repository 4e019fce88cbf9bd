# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: runs in the API server, the engine core and every worker.

Nothing here may fail at import: vLLM would log the ImportError and go on without the plugin. All checks run
inside `register` and raise.
"""

SWITCH = "KIMI_K3_CPU_MLA"  # dcp (default) | stock: which MLA backend the CPU platform gets
_lock_state: str | None = None


def register() -> None:
    """Check the source lock and install what this platform needs. Idempotent, as vLLM demands.

    Raises:
        SourceLockError: vLLM's text is not the locked one.
        UserError: KIMI_K3_CPU_MLA has an unknown value.
        PrefillKVError: KIMI_K3_PREFILL_KV asks for what this platform cannot do.
        ShardError: VLLM_KIMI_SHARD_QKV_A has an unknown value.
    """
    import os

    global _lock_state
    choice = os.environ.get(SWITCH, "dcp")
    if choice not in ("dcp", "stock"):
        from kimi_k3_serve.errors import UserError

        raise UserError(f"{SWITCH}={choice!r} is not known; use dcp or stock")
    if _lock_state is not None:
        return

    from vllm.platforms import current_platform

    from kimi_k3_serve import loader, source_lock

    state = source_lock.verify()
    from kimi_k3_serve.attention import backends, ownership

    loader.install()
    backends.install()
    ownership.install(kimi=current_platform.is_cuda())
    if current_platform.is_cuda():
        from kimi_k3_serve.attention import cures

        cures.install()
    if current_platform.is_cpu() and choice == "dcp":
        from kimi_k3_serve import cpu

        cpu.install()

    from kimi_k3_serve.publish import hook

    hook.install(current_platform.device_type)

    from kimi_k3_serve.projection import shard

    if shard.enabled():
        from kimi_k3_serve.projection import install

        install.install(current_platform.device_type)

    from kimi_k3_serve import metrics

    metrics.install()
    _lock_state = state


def lock_state() -> str | None:
    """ "locked" or "unlocked" once `register` has run in this process, else None."""
    return _lock_state
