"""What several processes need to agree, and to be ready: snapshots, their digest, and warm-up.

Nothing here talks to other processes: one tunes, and the framework sends its snapshot to the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from mxkv import devices, dispatch, settings
from mxkv.autotune_cache.entries import EntryError, bundle_bytes, read_bundle
from mxkv.autotune_cache.keys import LARGEST_BUCKET, bucket, digest_of
from mxkv.autotune_cache.lookup import MissingConfigError, resolver
from mxkv.contracts import Spec


def _here() -> list[torch.device]:
    """The devices of this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def snapshot() -> bytes:
    """Every tuned configuration that calls on this process's devices may use, to be given to :func:`load_snapshot`.

    Equal configurations give equal bytes. It is also what ``mxkv configs import`` reads.
    """
    return bundle_bytes(entry for _, entry in resolver().visible(_here()).values())


def load_snapshot(data: bytes) -> None:
    """Use the configurations of a :func:`snapshot` in this process.

    They come before the cache and the shipped ones, and replace those of an earlier snapshot. They are not written.

    Raises:
        TypeError: ``data`` is not bytes.
        ValueError: Something is wrong with it. Nothing has changed.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a snapshot is bytes, got {type(data).__name__}")
    try:
        entries = read_bundle(bytes(data)).entries
    except EntryError as error:
        raise ValueError(f"this is no snapshot of tuned configurations: {error}") from None
    resolver().use_snapshot(entries)


def digest() -> str:
    """What calls on this process's GPUs are launched with, as one string: ranks that agree have equal ones.

    It covers which configuration each key gets, not when or where that was measured. Where there is no GPU it is about
    the CPU; where there is one it is not, so that numbers of threads do not matter.
    """
    here = _here()[1:] or _here()
    answers = {key.identity: entry.best for key, (_, entry) in resolver().visible(here).items()}
    kinds = sorted({(d.arch, d.compute_units) for d in map(devices.describe, here)})
    return digest_of({"tuned": settings.current().tune != "off", "devices": kinds, "answers": answers})


def warmup(specs: Iterable[Spec], tokens: Iterable[int | tuple[int, ...]] | int | None = None) -> None:
    """Look up and compile ahead what calls will be launched with, so that the first of them waits for nothing.

    Args:
        specs: The calls, as :func:`mxkv.plan` takes them. The backend is the one that would run them now.
        tokens: Their sizes: a number for an operation of one size, a tuple for one of several. None stands for every
            size; then those that ``MXKV_TUNE=strict`` would refuse are passed over, unless that is all of them.

    Raises:
        ValueError: No backend can run one of the calls.
        MissingConfigError: Nothing was tuned for it, and the policy is strict.
    """
    given: list[int | tuple[int, ...]] | None = None
    if tokens is not None:
        given = [tokens] if isinstance(tokens, int) else list(tokens)
    for spec in specs:
        _warm(spec, given)


def _warm(spec: Spec, given: list[int | tuple[int, ...]] | None) -> None:
    dispatch.plan(spec)
    name = dispatch.explain_spec(spec).chosen
    if name is None:  # plan() has raised
        return
    operations = dispatch.get_backend(name).load()
    if not hasattr(operations, "tunable"):
        return
    tunable = operations.tunable(spec)
    if given is None:
        powers = [1 << power for power in range(LARGEST_BUCKET.bit_length())]
        sizes = set(itertools.product(powers, repeat=len(tunable.sizes)))
    else:
        sizes = {tuple(map(bucket, (size,) if isinstance(size, int) else size)) for size in given}
    configs: dict[Any, None] = {}
    missing = None
    for buckets in sorted(sizes):
        try:
            found = resolver().find(spec, buckets, backend=name, tunable=tunable, log=given is not None)
        except MissingConfigError as error:
            if given is not None:
                raise
            missing = error
        else:
            configs[found.config] = None
    if missing is not None and not configs:
        raise missing
    if hasattr(operations, "compile"):
        for config in configs:
            operations.compile(spec, config)
