"""The trainer's origin: its door, its routes, and what they answer to nonsense."""

import msgspec
import pytest
import trio
from shardcast_world import ALICE, BOB, publish, shard_bytes_of, world_in

from p2p.shardcast.origin import MAX_LEDGER_BYTES, OriginDoor, checkpoint_routes, ledger_routes, origin_routes
from protocol.errors import RefusedError


async def refused(http, url, **more):
    with pytest.raises(RefusedError) as caught:
        await http.get(url, **more)
    return caught.value.code


async def test_only_relays_with_a_token_are_let_in(tmp_path):
    """Anyone on the network asks the trainer for its weights, with no token, a wrong one, or a revoked one."""
    door = OriginDoor()
    with trio.fail_after(20):
        async with world_in(tmp_path) as world:
            manifest = await publish(world.trainer, world.policy)
            address = await world.serve(origin_routes(world.trainer, lambda first, limit: []), door.middleware)
            url = f"{address.url}/v1/checkpoints/{manifest.id.hex()}/manifest"
            token = door.token_for(ALICE)
            assert door.token_for(ALICE) == token != door.token_for(BOB)
            answer = await world.http.get(url, headers={"Authorization": f"Bearer {token}"})
            assert answer.body == manifest.data
            for bad in ("", token, f"Bearer {token}x", "Bearer ", f"Basic {token}", "Bearer \xe9"):
                assert await refused(world.http, url, headers={"Authorization": bad}) == "unauthorized"
            assert await refused(world.http, f"{address.url}/v1/ledger") == "unauthorized"
            assert await refused(world.http, f"{address.url}/nothing") == "unauthorized"
            door.revoke(ALICE)
            assert await refused(world.http, url, headers={"Authorization": f"Bearer {token}"}) == "unauthorized"


def test_the_door_knows_whose_token_it_is():
    door = OriginDoor()
    tokens = {relay: door.token_for(relay) for relay in (ALICE, BOB)}
    assert [door.holder(f"Bearer {tokens[relay]}") for relay in (BOB, ALICE)] == [BOB, ALICE]
    assert all(16 <= len(token) <= 128 for token in tokens.values())  # what an OriginNotice carries


async def test_shards_across_files_and_in_part(tmp_path):
    with trio.fail_after(20):
        async with world_in(tmp_path) as world:
            manifest = await publish(world.trainer, world.policy)
            address = await world.serve(checkpoint_routes(world.trainer))
            for index in range(8):
                expected = shard_bytes_of(world.trainer, manifest.id, index)
                url = f"{address.url}/v1/checkpoints/{manifest.id.hex()}/shards/{index}"
                assert (await world.http.get(url)).body == expected
                part = await world.http.get(url, headers={"Range": "bytes=100-299"})
                assert (part.status, part.body) == (206, expected[100:300])


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("{id}/shards/8", "not-found"),
        ("{id}/shards/-1", "malformed"),
        ("{id}/shards/1e3", "malformed"),
        ("{id}/shards/99999999999999999999", "malformed"),
        ("{id}/shards/%D9%A3", "malformed"),
        ("{id}/shards/..%2f..%2f.manifest", "malformed"),
        ("zz/manifest", "malformed"),
        ("ab/manifest", "malformed"),
        ("%FF/manifest", "malformed"),
        ("..%2f..%2fetc%2fpasswd/manifest", "malformed"),
        ("{other}/manifest", "not-found"),
        ("{other}/shards/0", "not-found"),
        ("", "not-found"),
    ],
)
async def test_nonsense_in_a_path_is_refused_by_name(tmp_path, path, code):
    """A client asks for shards and ids that are not there, or for files beside the checkpoint."""
    with trio.fail_after(20):
        async with world_in(tmp_path) as world:
            manifest = await publish(world.trainer, world.policy)
            address = await world.serve(checkpoint_routes(world.trainer))
            path = path.replace("{id}", manifest.id.hex()).replace("{other}", "00" * 32)
            assert await refused(world.http, f"{address.url}/v1/checkpoints/{path}") == code


async def test_the_ledger_is_read_in_parts_that_fit(tmp_path):
    entries = [bytes([index]) * (1 << 20) for index in range(6)]
    asked = []

    def read(first, limit):
        asked.append((first, limit))
        return entries[first : first + limit]

    with trio.fail_after(20):
        async with world_in(tmp_path) as world:
            address = await world.serve(ledger_routes(read))
            got = []
            while len(got) < len(entries):
                answer = await world.http.get(
                    f"{address.url}/v1/ledger?from={len(got)}", max_bytes=MAX_LEDGER_BYTES + (1 << 20)
                )
                got += msgspec.msgpack.decode(answer.body)
            assert got == entries
            assert asked == [(0, 500), (4, 500)]
            assert await refused(world.http, f"{address.url}/v1/ledger?from=-1") == "malformed"
            assert msgspec.msgpack.decode((await world.http.get(f"{address.url}/v1/ledger?from=6&limit=0")).body) == []
