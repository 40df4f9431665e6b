"""What the tests of tuned configurations share: a tunable, calls, keys and entries."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mxkv import formats, paging
from mxkv.autotune_cache.entries import Candidate, Entry, config_to_json
from mxkv.autotune_cache.keys import Key, key_of, soft_of
from mxkv.contracts import LoadSpec, Spec, StoreSpec, Tunable

CPU = torch.device("cpu")
BACKEND = "torch"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A configuration with a field of each type."""

    block_tokens: int
    num_warps: int
    staged: bool = False
    order: str = "rows"


SPACE = tuple(Launch(block_tokens, num_warps, staged) for block_tokens in (1, 2, 4, 8) for num_warps in (1, 4)
              for staged in (False, True))  # fmt: skip


def default(tokens: int) -> Launch:
    return Launch(8 if tokens >= 4096 else 1, 1)


TUNABLE = Tunable(Launch, SPACE, default, ("tokens",), target="cpu", source="5ca1ab1e", compiler="none 1.0")


def tunable(**changes: Any) -> Tunable:
    return dataclasses.replace(TUNABLE, **changes)


def layout(format: str = "mxfp4", latent_dim: int = 512, blocks: int = 4, size: int = 64) -> paging.PageLayout:
    return paging.contiguous_layout(formats.FORMATS[format], latent_dim, blocks, size)


def store_spec(format: str = "mxfp4", latent_dim: int = 512, **fields: Any) -> StoreSpec:
    named = formats.FORMATS[format]
    return StoreSpec(**{
        "device": CPU, "format": named, "latent_dim": latent_dim, "latent_dtype": torch.bfloat16,
        "layout": layout(format, latent_dim), **fields,
    })  # fmt: skip


def load_spec(format: str = "mxfp4", latent_dim: int = 512, **fields: Any) -> LoadSpec:
    named = formats.FORMATS[format]
    return LoadSpec(**{
        "device": CPU, "format": named, "latent_dim": latent_dim, "out_dtype": torch.bfloat16,
        "layout": layout(format, latent_dim), **fields,
    })  # fmt: skip


def key(spec: Spec | None = None, tokens: int = 512, of: Tunable = TUNABLE, backend: str = BACKEND) -> Key:
    return key_of(spec or store_spec(), (tokens,), backend=backend, tunable=of)


def rekeyed(key: Key, **changes: Any) -> Key:
    return Key({**key.hard, **changes})


def entry(of: Key | None = None, best: Launch = SPACE[3], tunable: Tunable = TUNABLE, **provenance: Any) -> Entry:
    """An entry whose best is ``best``, with statistics of the whole space; its last candidate was rejected."""
    candidates = [
        Candidate(config_to_json(config), 10.5 + n, 10.25 + n, 11.0 + n, 100) for n, config in enumerate(SPACE[:-1])
    ]
    candidates.append(Candidate(config_to_json(SPACE[-1]), rejected="wrong bytes in 3 of 256 records"))
    return Entry(
        key=of or key(),
        soft=soft_of(tunable),
        best=config_to_json(best),
        candidates=tuple(candidates),
        default=config_to_json(default(512)),
        provenance={"device": "CPU", "date": "2026-01-01", **provenance},
    )
