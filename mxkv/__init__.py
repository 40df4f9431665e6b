"""mxkv: an LLM's KV cache in 4 to 8 bits a value."""

from __future__ import annotations

from mxkv.contracts import AttendSpec, LoadSpec, StoreSpec, Verdict
from mxkv.dispatch import plan, use_backend
from mxkv.formats import FORMATS, Element, Format, Placement, Scale
from mxkv.operations import attend, attend_workspace_bytes, empty_cache, explain, load, merge_partials, store

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "AttendSpec",
    "Element",
    "Format",
    "LoadSpec",
    "Placement",
    "Scale",
    "StoreSpec",
    "Verdict",
    "attend",
    "attend_workspace_bytes",
    "empty_cache",
    "explain",
    "load",
    "merge_partials",
    "plan",
    "store",
    "use_backend",
]
