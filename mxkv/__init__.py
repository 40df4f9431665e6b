"""mxkv: an LLM's KV cache in 4 to 8 bits a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxkv.autotune_cache.lookup import MissingConfigError
from mxkv.autotune_cache.snapshots import digest, load_snapshot, snapshot, warmup
from mxkv.contracts import LoadSpec, StoreSpec, Verdict
from mxkv.dispatch import plan, use_backend
from mxkv.formats import FORMATS, Element, Format, Placement, Scale
from mxkv.operations import empty_cache, explain, load, spec, store

if TYPE_CHECKING:
    from mxkv.autotune_cache.tuner import tuning

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "Element",
    "Format",
    "LoadSpec",
    "MissingConfigError",
    "Placement",
    "Scale",
    "StoreSpec",
    "Verdict",
    "digest",
    "empty_cache",
    "explain",
    "load",
    "load_snapshot",
    "plan",
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
