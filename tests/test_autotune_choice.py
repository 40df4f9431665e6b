"""The hot path's memo of configurations."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mxkv import settings
from mxkv.autotune_cache.choice import Choice
from mxkv.autotune_cache.lookup import Found, Resolver, resolver
from tests.tuned_entries import TUNABLE, entry, key, store_spec

SPEC = store_spec()


@pytest.fixture(autouse=True)
def nothing_tuned(fresh_settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_settings.setenv("MXKV_CACHE_DIR", str(tmp_path))
    settings.reload()


def test_sizes_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    find = Resolver.find

    def counting(self: Resolver, spec: Any, sizes: tuple[int, ...], **named: Any) -> Found:
        asked.append(sizes)
        return find(self, spec, sizes, **named)

    monkeypatch.setattr(Resolver, "find", counting)
    choose = Choice(SPEC, "torch", TUNABLE)
    assert choose(500) == choose(500) == choose(512)
    assert asked == [(512,), (512,)]


def test_an_entry_that_is_recorded_is_taken_from_then_on() -> None:
    choose = Choice(SPEC, "torch", TUNABLE)
    before = choose(512)
    one = entry(key(tokens=512))
    assert resolver().record(one)
    assert choose(512) == one.choice(TUNABLE) != before


def test_an_answer_of_an_earlier_generation_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread looks up; before it is done another records an entry and asks: the first must not keep what it had."""
    choose = Choice(SPEC, "torch", TUNABLE)
    asked, recorded = threading.Event(), threading.Event()
    find = Resolver.find

    def slow(self: Resolver, *arguments: Any, **named: Any) -> Found:
        found = find(self, *arguments, **named)
        if threading.current_thread() is first:
            asked.set()
            assert recorded.wait(20)
        return found

    monkeypatch.setattr(Resolver, "find", slow)
    first = threading.Thread(target=choose, args=(512,))
    first.start()
    assert asked.wait(20)
    one = entry(key(tokens=512))
    resolver().record(one)
    choose(4096)  # takes the new generation
    recorded.set()
    first.join()
    assert choose(512) == one.choice(TUNABLE)
