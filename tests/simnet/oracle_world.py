"""Evidence of a run that never took place: three steps, one honest contributor, one cheat; to be spoilt by tests."""

from simnet_world import make_recording, peer_id

from simnet.gather import Details, DiscoverySeen, LoopSeen
from simnet.oracles import ORACLES, Evidence, Judgement
from simnet.oracles.books import Account, Books, Copy, StepSeen, SubmissionSeen
from simnet.oracles.logs import CheckpointSeen
from simnet.oracles.promises import Promise
from simnet.sampling import ProcessSample, ProcessSeen

HONEST, CHEAT = peer_id("inference-0"), peer_id("wrong-model-0")
STEPS = 3
START_MS = 1_700_000_000_000


def submission(number: int, **changes) -> SubmissionSeen:
    """The honest contributor's submission of a step, which is trained 10 s after it was made."""
    made_ms = START_MS + 10_000 + 10_000 * number
    fields = {
        "id": f"{number:064x}", "contributor": HONEST, "step": number, "checkpoint_step": max(0, number - 1),
        "state": "accepted", "rollouts": 8, "tokens": 100, "made_ms": made_ms, "received_ms": made_ms + 100,
        "judged_ms": made_ms + 1100, "used_in": number,
    }  # fmt: skip
    return SubmissionSeen(**(fields | changes))


def make_books() -> Books:
    honest = [submission(number) for number in range(STEPS)]
    lie = submission(99, contributor=CHEAT, state="rejected", used_in=None, hard=True, reason="toploc")
    return Books(
        max_staleness=2,
        total_steps=STEPS,
        entries=20,
        submissions=[*honest, lie],
        steps=[
            StepSeen(one.step, [one.id], one.made_ms + 5000, one.made_ms + 10_000, due_ms=one.judged_ms)
            for one in honest
        ],
        accounts=[Account(HONEST, "active", 300, STEPS), Account(CHEAT, "evicted", 0, 0, {"toploc": 1})],
        copies=[Copy("relay-0", 18, agrees=True)],
        promises=[Promise(one.id, one.contributor, one.received_ms or 0, accepts=1) for one in honest],
        sources={"store": ["relay-0"], "outbox": ["inference-0", "wrong-model-0"], "docket": ["validator-0"]},
    )


def make_evidence() -> Evidence:
    recording = make_recording()
    recording.trainer.contributors[0].credits, recording.trainer.contributors[0].accepted = 300, STEPS
    recording.trainer.contributors[1].rejected = {"toploc": 1}
    recording.late_p99_ms = 5
    for node in recording.nodes:
        node.lives[-1].final = True
        node.processes = [process([50_000_000] * 60)]
        loop = DiscoverySeen(LoopSeen(400, 1, 20, 90, 50))
        if node.role == "trainer":
            node.lives[-1].status.details.discovery = loop
        else:
            node.lives[-1].status.details = Details(discovery=loop)
        node.lives[-1].status_at_ms = node.lives[-1].ended_ms
        for life in node.lives:
            life.first_status_at_ms = life.started_ms + 1000
    checkpoints = [
        CheckpointSeen(
            step,
            START_MS + 10_000 * step,
            {"relay-0": START_MS + 10_000 * step + 500},
            {"inference-0": START_MS + 10_000 * step + 900, "validator-0": START_MS + 10_000 * step + 700},
        )
        for step in range(STEPS)
    ]
    return Evidence(recording, make_books(), checkpoints)


def process(private_bytes, *, every_s=10.0, descriptors=None, tasks=None, network=True) -> ProcessSeen:
    """A process that was looked at every so many seconds."""
    count = len(private_bytes)
    samples = [
        ProcessSample(START_MS + round(1000 * every_s * at), memory, fds, number)
        for at, (memory, fds, number) in enumerate(
            zip(private_bytes, descriptors or [30] * count, tasks or [50] * count, strict=True)
        )
    ]
    return ProcessSeen(10, START_MS, network, "cli", samples)


def judgement(evidence: Evidence, words: str) -> Judgement:
    """What the oracle says whose name has these words."""
    (found,) = [one for one in (oracle(evidence) for oracle in ORACLES) if words in one.name]
    return found
