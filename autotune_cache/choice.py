"""A launch's choice of configuration, as the hot path asks for it."""

from __future__ import annotations

from typing import Any

from mxkv.autotune_cache.keys import bucket
from mxkv.autotune_cache.lookup import resolver, tuner
from mxkv.contracts import Spec, Tunable

_MOST_SIZES = 4096


class Choice:
    """The configuration of one kind of call on one backend, for the sizes of each call.

    A call's sizes are looked up once; until something changes what a look-up answers, a further call of the same sizes
    costs one look into a dictionary.

    Args:
        spec: The call.
        backend: The backend's name.
        tunable: What that backend lets be chosen.
    """

    def __init__(self, spec: Spec, backend: str, tunable: Tunable) -> None:
        self.spec = spec
        self.backend = backend
        self.tunable = tunable
        self._resolver = resolver()
        self._generation = -1
        self._known: dict[tuple[int, ...], Any] = {}

    def __call__(self, *sizes: int) -> Any:
        """The configuration for a call's sizes, in the order of the tunable's ``sizes``."""
        if self._generation != self._resolver.generation:
            # The memo first: a thread that sees the new generation must not find the old answers.
            self._known, self._generation = {}, self._resolver.generation
        known = self._known
        found = known.get(sizes)
        if found is None or tuner.get() is not None:  # inside of `tuning` another thread's default is no answer
            buckets = tuple(bucket(size) for size in sizes)
            found = self._resolver.find(self.spec, buckets, backend=self.backend, tunable=self.tunable).config
            if len(known) >= _MOST_SIZES:
                known.clear()
            known[sizes] = found  # of the generation that was asked: if that is over, nobody looks there any more
        return found
