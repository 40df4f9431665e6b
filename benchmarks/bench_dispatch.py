"""What a call of ``mxkv.store`` and ``mxkv.load`` costs beyond the backend's function: at most 5 us.

    pytest benchmarks/bench_dispatch.py --benchmark-json=dispatch.json
    python benchmarks/bench_dispatch.py            # writes benchmarks/results/cpu/dispatch.json

The backend does nothing, so that what is left is checks, the look-up of the plan, and torch's operator. ``direct`` is
the same function called with the same arguments; for ``load`` it allocates the rows too, as the operation does.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mxkv
from mxkv import dispatch
from mxkv.contracts import YES, Backend, LoadSpec, StoreSpec
from mxkv.paging import contiguous_layout

ROOT = Path(__file__).resolve().parent.parent
Call = Callable[[], object]


def do_nothing(spec: object, *tensors: object) -> None:
    return None


NOTHING = Backend(
    name="nothing",
    priority=10**6,
    description="does nothing",
    probe=lambda device: YES,
    supports=lambda spec: YES,
    load=lambda: SimpleNamespace(store=do_nothing, load=do_nothing),
    operations=frozenset({"store", "load"}),
)


def calls() -> dict[str, tuple[Call, Call]]:
    """For each operation: the call through dispatch, and the backend's function by itself."""
    cache, latent = mxkv.empty_cache("mxfp4", 16, 64, 512), torch.randn(1, 512).bfloat16()
    slots, positions, table = torch.tensor([3]), torch.tensor([1]), torch.ones(8, 64)
    format = mxkv.FORMATS["mxfp4"]
    layout = contiguous_layout(format, 512, 16, 64)
    store_spec = StoreSpec(cache.device, format, 512, latent.dtype, layout)
    rope_spec = StoreSpec(cache.device, format, 512, latent.dtype, layout, positioned=True, rotate=True)
    load_spec = LoadSpec(cache.device, format, 512, torch.bfloat16, layout)

    def load_directly() -> None:
        out = torch.empty((1, 512), dtype=torch.bfloat16, device=cache.device)
        do_nothing(load_spec, cache, slots, out, None)

    return {
        "store": (
            lambda: mxkv.store(cache, latent, slots),
            lambda: do_nothing(store_spec, cache, latent, slots, None, None, None),
        ),
        "store with RoPE": (
            lambda: mxkv.store(cache, latent, slots, positions=positions, cos_sin=table),
            lambda: do_nothing(rope_spec, cache, latent, slots, positions, table, None),
        ),
        "load": (lambda: mxkv.load(cache, slots), load_directly),
    }


@pytest.fixture(scope="module")
def idle_backend() -> Iterator[None]:
    with dispatch.added_backend(NOTHING):
        yield


@pytest.mark.parametrize("how", ["dispatched", "direct"])
@pytest.mark.parametrize("operation", ["store", "store with RoPE", "load"])
def test_one_token(benchmark: Any, idle_backend: None, operation: str, how: str) -> None:
    benchmark.group = operation
    dispatched, direct = calls()[operation]
    benchmark(dispatched if how == "dispatched" else direct)


def overheads(rounds: int = 31, number: int = 5000) -> dict[str, dict[str, float]]:
    """Medians in us of alternating rounds."""
    found = {}
    with dispatch.added_backend(NOTHING):
        for operation, (dispatched, direct) in calls().items():
            dispatched()
            through, alone = [], []
            for _ in range(rounds):
                through.append(timeit.timeit(dispatched, number=number) / number * 1e6)
                alone.append(timeit.timeit(direct, number=number) / number * 1e6)
            found[operation] = {
                "dispatched_us": statistics.median(through),
                "direct_us": statistics.median(alone),
                "overhead_us": statistics.median(t - a for t, a in zip(through, alone, strict=True)),
                "best_overhead_us": min(through) - min(alone),
            }
    return found


def main() -> None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    result = {
        "environment": {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "cpu": names[0] if names else "unknown",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mxkv": mxkv.__version__,
        },
        "limit_us": 5.0,
        "operations": overheads(),
    }
    target = ROOT / "benchmarks/results/cpu/dispatch.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
