"""What hostile peers of the DHT can do in a scenario; `simnet.hostile` does it."""

from __future__ import annotations

from typing import Final

ATTACKS: Final[dict[str, str]] = {
    "eclipse": "eight identities drawn around the run's key: they name one another only, keep nothing, invent relays",
    "flood": "asks every server without pause, and stores forged records and invented providers wherever it can",
    "garbage": "sends noise: on sockets, in streams of the DHT's protocol, and as answers to whoever asks it",
}
