# SPDX-License-Identifier: Apache-2.0
"""Attention backends that own their decode collectives, and the exact merge they share."""
