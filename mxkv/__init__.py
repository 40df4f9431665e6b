"""mxkv: an LLM's KV cache in 3 to 8 bits a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxkv.autotune_cache.lookup import MissingConfigError
from mxkv.autotune_cache.snapshots import digest, load_snapshot, snapshot, warmup
from mxkv.compression import compress_norm, compress_store, save_ring_rows
from mxkv.contracts import (
    AttendKVSpec,
    AttendSpec,
    CompressSpec,
    CompressStoreSpec,
    LoadKVSpec,
    LoadSpec,
    SaveRingSpec,
    StoreKVSpec,
    StoreSpec,
    Verdict,
)
from mxkv.dispatch import plan, use_backend
from mxkv.formats import FORMATS, Element, Format, Placement, Scale
from mxkv.kv_formats import KV_FORMATS, KeyCode, KVFormat
from mxkv.kv_operations import attend_kv, attend_kv_workspace_bytes, empty_kv_cache, load_kv, store_kv
from mxkv.operations import attend, attend_workspace_bytes, empty_cache, explain, load, merge_partials, spec, store

if TYPE_CHECKING:
    from mxkv.autotune_cache.tuner import tuning

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "KV_FORMATS",
    "AttendKVSpec",
    "AttendSpec",
    "CompressSpec",
    "CompressStoreSpec",
    "Element",
    "Format",
    "KVFormat",
    "KeyCode",
    "LoadKVSpec",
    "LoadSpec",
    "MissingConfigError",
    "Placement",
    "SaveRingSpec",
    "Scale",
    "StoreKVSpec",
    "StoreSpec",
    "Verdict",
    "attend",
    "attend_kv",
    "attend_kv_workspace_bytes",
    "attend_workspace_bytes",
    "compress_norm",
    "compress_store",
    "digest",
    "empty_cache",
    "empty_kv_cache",
    "explain",
    "load",
    "load_kv",
    "load_snapshot",
    "merge_partials",
    "plan",
    "save_ring_rows",
    "snapshot",
    "spec",
    "store",
    "store_kv",
    "tuning",
    "use_backend",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name == "tuning":  # the tuner is needed by few
        from mxkv.autotune_cache.tuner import tuning

        return tuning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
