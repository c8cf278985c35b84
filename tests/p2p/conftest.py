"""Fixtures of checkpoint tests: a trainer with versions of one model, a node's store, relays on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from patch_world import Network, Trainer, network_of
from shardcast_world import World, world_in

from p2p.shardcast.store import CheckpointStore


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_in(tmp_path) as world:
        yield world


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
async def network(trainer: Trainer) -> AsyncIterator[Network]:
    async with network_of(trainer) as network:
        yield network


@pytest.fixture
def node(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "node")
