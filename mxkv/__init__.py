"""mxkv: an LLM's KV cache in 4 to 8 bits a value."""

from __future__ import annotations

from mxkv.contracts import LoadSpec, StoreSpec, Verdict
from mxkv.dispatch import plan, use_backend
from mxkv.formats import FORMATS, Element, Format, Placement, Scale
from mxkv.operations import empty_cache, explain, load, store

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "Element",
    "Format",
    "LoadSpec",
    "Placement",
    "Scale",
    "StoreSpec",
    "Verdict",
    "empty_cache",
    "explain",
    "load",
    "plan",
    "store",
    "use_backend",
]
