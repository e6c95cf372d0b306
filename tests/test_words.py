"""The field's words, and one word for one thing: what GLOSSARY's left column bans stands in no source and no page."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = {
    r"\bcards?\b": "GPU, device",
    r"\bmultiprocessors?\b": "SM",
    r"\b(?:second|first)-level caches?\b": "L2, L1",
    r"\bcopy engines?\b": "TMA",
    r"\bproducts' unit\b": "wgmma, tensor cores",
    r"\b(?:somebody|everybody|anybody|nobody)\b": "thread block, warp, partition, caller",
    r"\bwho(?:ever|m|se)?\b": "the subject itself: thread block, warp, caller, request",
    r"\bnotes?\b(?!:)|\bnotebooks?\b|\bnoted\b": "task record",
    r"\bdrawn\b|\blikeliest\b": "sampled; greedy (argmax)",
    r"\bcompany\b": "batch, batch-mates",
    r"\bvisits?\b|\bvisited\b": "split, KV tiles a task reads",
    r"\beasy\b": "slack, has slack",
    r"\btells? the others\b|\bwho is told\b": "hand-off, with its kind",
    r"\bwhat is added up\b": "residual stream, partial sums",
    r"\b(?:MOST|FEW)_\w+|\b(?:most|few)_[a-z]\w*": "max_x, num_x, x_bytes, x_us",
    r"\bread otherwise\b|\btaken apart\b": "dequantise, unpack, widen",
    r"\bsee its batch\b|\bkeeps? its bits\b": "batch-invariant, bitwise equal",
    r"\bcomes? compiled\b": "prebuilt kernels",
    r"\bgoes to the\b|\bis left to\b|\bare left to\b": "falls back to",
}
