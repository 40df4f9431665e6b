"""mxkv: an LLM's KV cache in 4 to 8 bits a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxkv.autotune_cache.lookup import MissingConfigError
from mxkv.autotune_cache.snapshots import digest, load_snapshot, snapshot, warmup
from mxkv.compression import compress_norm, compress_store, save_ring_rows
from mxkv.contracts import AttendSpec, CompressSpec, CompressStoreSpec, LoadSpec, SaveRingSpec, StoreSpec, Verdict
from mxkv.dispatch import plan, use_backend
from mxkv.formats import FORMATS, Element, Format, Placement, Scale
from mxkv.operations import attend, attend_workspace_bytes, empty_cache, explain, load, merge_partials, spec, store

if TYPE_CHECKING:
    from mxkv.autotune_cache.tuner import tuning

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "AttendSpec",
    "CompressSpec",
    "CompressStoreSpec",
    "Element",
    "Format",
    "LoadSpec",
    "MissingConfigError",
    "Placement",
    "SaveRingSpec",
    "Scale",
    "StoreSpec",
    "Verdict",
    "attend",
    "attend_workspace_bytes",
    "compress_norm",
    "compress_store",
    "digest",
    "empty_cache",
    "explain",
    "load",
    "load_snapshot",
    "merge_partials",
    "plan",
    "save_ring_rows",
    "snapshot",
    "spec",
    "store",
    "tuning",
    "use_backend",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name == "tuning":  # the tuner is needed by few
        from mxkv.autotune_cache.tuner import tuning

        return tuning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
