"""Backends that lie and crash, for the tests of the tuner: the torch backend, spoilt by its configuration."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from mxkv.autotune_cache.choice import Choice
from mxkv.backends.torch_eager import latents
from mxkv.contracts import YES, Backend, Spec, StoreSpec, Tunable, Verdict

launches: list[tuple[str, PlantedConfig]] = []
"""Every call of this process: which backend made it, and how."""


@dataclasses.dataclass(frozen=True)
class PlantedConfig:
    """What a call does.

    Attributes:
        mode: "good", or what goes wrong.
        delay_us: How long it waits.
    """

    mode: str
    delay_us: int = 1


GOOD = PlantedConfig("good", 100)
BEST = PlantedConfig("good", 20)
SLOW = PlantedConfig("good", 2000)
BAD = tuple(
    PlantedConfig(mode)
    for mode in ("wrong", "guard", "kill", "hang", "exit", "raise", "late kill", "late raise", "does not compile")
)


class Operations:
    """What ``Backend.load`` gives.

    Args:
        name: The backend's.
        space: What may be chosen.
        default: What is chosen without tuning.
        source: The version of the code.
    """

    def __init__(
        self, name: str, space: tuple[PlantedConfig, ...], default: PlantedConfig = GOOD, source: str = "1"
    ) -> None:
        self.name, self.space, self.default, self.source = name, space, default, source

    def tunable(self, spec: Spec) -> Tunable:
        return Tunable(
            PlantedConfig, self.space, lambda tokens: self.default, target="cpu", source=self.source, compiler="none 1"
        )

    def prepare(self, spec: Spec) -> Callable[..., None]:
        return functools.partial(self.run, spec, Choice(spec, self.name, self.tunable(spec)), [0])

    def run(
        self, spec: Spec, choose: Choice, calls: list[int], *tensors: Any, config: PlantedConfig | None = None
    ) -> None:
        store = isinstance(spec, StoreSpec)
        if config is None:
            config = choose(tensors[2 if store else 1].shape[0])
        launches.append((self.name, config))
        del launches[:-10_000]
        (latents.store if store else latents.load)(spec, *tensors)  # type: ignore[operator]
        until = time.perf_counter() + config.delay_us * 1e-6
        calls[0] += config.mode.startswith("late")
        written = tensors[0] if store else tensors[2]
        match config.mode:
            case "wrong":
                written.view(torch.uint8).flatten()[-1].add_(1)
            case "guard":
                written.view(torch.uint8).as_strided((1,), (1,), 1024 + written.nbytes).add_(1)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "late kill" if calls[0] > 12:
                os.kill(os.getpid(), signal.SIGKILL)
            case "late raise" if calls[0] > 12:
                raise RuntimeError("tired")
            case "hang":
                time.sleep(1000)
            case "exit":
                sys.exit(3)
            case "raise":
                raise ZeroDivisionError("of all\nthings")
        while time.perf_counter() < until:
            pass


class Compiled(Operations):
    """Operations that can be compiled ahead, which the others cannot: each test that compiles starts a process more."""

    def compile(self, spec: Spec, config: PlantedConfig) -> None:
        if config.mode == "does not compile":
            raise RuntimeError("ptxas: a register too many")


def probe(device: torch.device) -> Verdict:
    return YES if device.type == "cpu" else Verdict(("it is planted on the CPU",))


def supports(spec: Spec) -> Verdict:
    return YES


def _backend(operations: Operations) -> Backend:
    # Worker processes find the backend through the module of its functions.
    return Backend(operations.name, -1, "planted", probe, supports, lambda: operations, frozenset({"store", "load"}))


SOUND = _backend(Operations("planted", (GOOD, BEST, SLOW)))
ROTTEN = _backend(Compiled("planted", (*BAD, GOOD, BEST)))
HOPELESS = _backend(Operations("planted", BAD[:2], BAD[0]))
CHANGED = _backend(Operations("planted", (GOOD, BEST, SLOW), source="2"))
COMPILED = _backend(Compiled("planted", (GOOD, BEST)))
GROWN = _backend(Operations("planted", (GOOD, BEST, SLOW, PlantedConfig("good", 50))))
DRAGGING = _backend(Operations("planted", tuple(PlantedConfig("good", 20_000 + i) for i in range(5))))
