"""Sums, maxima and minima over all warps of a partition.

A warp takes those of its own values, and then every thread those of the warps. Triton's own reduction over warps has
more barriers, and loads what the warps have under a predicate: the registers of threads that load nothing hold what
they held before, so that a loop around it keeps them all the while.

    best = gl.max(everywhere(gl.max(by_warp(logits, XW), axis=1), XW), axis=0)
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["by_warp", "everywhere", "sum_of_all"]


@gluon.jit
def by_warp(values, XW: gl.constexpr):
    """[n] of XW warps -> [XW, n / XW], a warp's values in a row. A thread's must be neighbours."""
    return gl.reshape(values, [XW, values.shape[0] // XW])


@gluon.jit
def everywhere(of_warps, XW: gl.constexpr):
    """[XW], a value a warp -> the same, all of them in every thread."""
    return gl.convert_layout(of_warps, gl.BlockedLayout([XW], [32], [XW], [0]))


@gluon.jit
def sum_of_all(values, XW: gl.constexpr):
    """The sum of [n] of XW warps, whole numbers, in every thread."""
    return gl.sum(everywhere(gl.sum(by_warp(values, XW), axis=1), XW), axis=0)
