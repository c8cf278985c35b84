"""What a simulation leaves of policies when it is asked to keep none."""

from simnet.weights import drop_weights


def test_the_trainers_newest_checkpoint_stays_and_all_else_of_policies_goes(tmp_path):
    trainer, relay = tmp_path / "trainer", tmp_path / "relay"
    gone = [
        *(trainer / "training" / f"step-{step:08d}" for step in (7, 9)),
        *(trainer / "run" / "policy-0", trainer / "checkpoints", relay / "checkpoints", relay / "patches"),
    ]
    kept = [trainer / "training" / "step-00000010", trainer / "run", trainer / "metrics", relay / "ledger"]
    for directory in (*gone, *kept):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").touch()
    drop_weights([trainer, relay])
    assert not [path for path in gone if path.exists()]
    assert all((path / "file").exists() for path in kept)


def test_a_node_that_never_began_has_nothing_to_lose(tmp_path):
    drop_weights([tmp_path / "nowhere"])
    assert not (tmp_path / "nowhere").exists()
