# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's latent projections as tensor-parallel column shards (contract 3), and the small gathers they need.

shard.py      which columns a rank holds, the order after a gather, padding, memory; pure
kernels.py    the gather over peer memory: its protocol and one Triton kernel
exchange.py   the buffers of that gather and its two calls: one merged projection, or two projections
b12x_row.py   one row over b12x's copy collective
gather.py     which way is taken, agreed by all ranks, and the all-gather that is always right
install.py    the places of vLLM that change
"""
