"""Reports of one-byte products."""

from __future__ import annotations

from kit.build import Built
from kit.reports.common import Report, counted


def product(built: Built) -> Report:
    """Report products on tensor cores, waits for them, and copies."""
    return counted(built, ("IGMMA", "QGMMA", "WARPGROUP.DEPBAR", "UTMALDG", "UTMASTG"))
