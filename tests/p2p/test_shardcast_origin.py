"""The trainer's origin: its door, its routes, and what they answer to nonsense."""

from types import SimpleNamespace

import msgspec
import pytest
import trio
from patch_world import Trainer
from shardcast_world import ALICE, BOB, publish, shard_bytes_of, world_in

from p2p.shardcast.fan_out import FanOut
from p2p.shardcast.origin import MAX_LEDGER_BYTES, OriginDoor, checkpoint_routes, ledger_routes, origin_routes
from protocol.errors import RefusedError


async def refused(http, url, **more):
    with pytest.raises(RefusedError) as caught:
        await http.get(url, **more)
    return caught.value.code


async def test_only_relays_with_a_token_are_let_in(world):
    """Anyone on the network asks the trainer for its weights, with no token, a wrong one, or a revoked one."""
    door = OriginDoor()
    with trio.fail_after(20):
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


async def test_a_shard_that_is_for_other_relays_is_not_given_in_any_form(tmp_path):
    """Two relays ask the trainer for every shard, patch and packed shard, when each is for one of them."""
    door, trainer = OriginDoor(), Trainer(tmp_path)
    old = await trainer.publish(1)
    trainer.model.move()
    new = await trainer.publish(2)
    fan_out = FanOut(door.holder, 1)
    routes = origin_routes(trainer.store, lambda first, limit: [], patches=trainer.patches, fan_out=fan_out)
    with trio.fail_after(20):
        async with world_in(tmp_path / "world") as world:
            address = await world.serve(routes, door.middleware)
            url = f"{address.url}/v1/checkpoints/{new.id.hex()}"
            tokens = [{"Authorization": f"Bearer {door.token_for(relay)}"} for relay in (ALICE, BOB)]
            for each in tokens:
                fan_out(SimpleNamespace(headers=each), 2, 1)

            async def holders(form):
                """Which of the two get it."""
                got = []
                for each in tokens:
                    try:
                        got.append((await world.http.get(f"{url}/{form}", headers=each)).status == 200)
                    except RefusedError as error:
                        assert error.code == "not-yet"  # noqa: PT017
                        got.append(False)
                return got

            shards = [await holders(f"shards/{index}") for index in range(6)]
            assert all(sum(each) == 1 for each in shards)
            for index in (1, 2):
                assert await holders(f"patches/{old.id.hex()}/{index}") == shards[index]
                assert await holders(f"packed/{index}") == shards[index]
            for each in tokens:
                assert (await world.http.get(f"{url}/manifest", headers=each)).body == new.data


def test_the_door_knows_whose_token_it_is():
    door = OriginDoor()
    tokens = {relay: door.token_for(relay) for relay in (ALICE, BOB)}
    assert [door.holder(f"Bearer {tokens[relay]}") for relay in (BOB, ALICE)] == [BOB, ALICE]
    assert all(16 <= len(token) <= 128 for token in tokens.values())  # what an OriginNotice carries


async def test_shards_across_files_and_in_part(world):
    with trio.fail_after(20):
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
async def test_nonsense_in_a_path_is_refused_by_name(world, path, code):
    """A client asks for shards and ids that are not there, or for files beside the checkpoint."""
    with trio.fail_after(20):
        manifest = await publish(world.trainer, world.policy)
        address = await world.serve(checkpoint_routes(world.trainer))
        path = path.replace("{id}", manifest.id.hex()).replace("{other}", "00" * 32)
        assert await refused(world.http, f"{address.url}/v1/checkpoints/{path}") == code


async def test_the_ledger_is_read_in_parts_that_fit(world):
    entries = [bytes([index]) * (1 << 20) for index in range(6)]
    asked = []

    def read(first, limit):
        asked.append((first, limit))
        return entries[first : first + limit]

    with trio.fail_after(20):
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
