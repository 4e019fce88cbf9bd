# SPDX-License-Identifier: Apache-2.0
"""Publication of prefill context: each rank writes its cached KV rows to their final place on every rank.

protocol.md     the protocol, and why it needs no barrier
layout.py       pure: where planes and signals lie in symmetric memory
chunks.py       context maps of a batch, in one copy to the device
kernel.py       Triton: publish (multicast or peer), wait, scale
collective_kernel.py   Triton: the fallback's rows before and after its all-gather
ranks.py        one rank's push and wait: Triton, and PyTorch for the CPU
publisher.py    slots, capacity, what cannot be published and why
collective.py   the fallback: all-gather, then take rows
choice.py       KIMI_K3_PREFILL_KV: which transport, and why
hook.py         the one method of vLLM that this replaces
verify.py       compares it with stock in the running engine, byte for byte
timing.py       times it, or stock, in the running engine
"""
