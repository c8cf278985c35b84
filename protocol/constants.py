"""Protocol constants. They are not configuration: each comment says what breaks when one changes.

Changing any value here needs a new PROTOCOL_VERSION, because nodes with different values disagree silently.
"""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""Part of every signature's domain. Nodes with another version refuse each other's records by name."""

SIGNATURE_DOMAIN: Final = f"intellect-node/{PROTOCOL_VERSION}"
"""First field under every signature. A change makes every existing signature invalid."""

PROOF_CHUNK_TOKENS: Final = 32
"""Decoded tokens that one TOPLOC proof covers. A change alters the number of proofs of every rollout."""

PROOF_FIELD: Final = 65497
"""Prime order of the field of the TOPLOC polynomial, the largest prime below 2^16 that the public format uses."""

MAX_CLOCK_SKEW_S: Final = 120.0
"""How far in the future a signed time may lie. Records beyond it are refused with a message about clocks."""

MAX_ENVELOPE_BYTES: Final = 1 << 20
"""No signed record is larger. Decoders refuse a longer input before they allocate anything."""

MAX_DHT_VALUE_BYTES: Final = 8192
"""Largest value that a DHT server stores. A larger run manifest cannot be published."""

MAX_SHARDS: Final = 1 << 14
"""Most shards of one checkpoint: a 64 GB policy in 16 MiB shards has 4096. Bounds the checkpoint manifest's size."""

MAX_BATCH_SUBMISSIONS: Final = 1 << 13
"""Most submissions of one batch. Bounds the ledger's largest entry; a larger one is refused by every node."""

MAX_BATCH_GROUPS: Final = 1 << 20
"""Most groups of one batch: its entry has a bit for each. Bounds the ledger's largest entry as well."""

MAX_POOL_TASKS: Final = 1 << 20
"""Most tasks of one pool file, which is then 33 MiB and travels with the policy. Readers refuse a longer file."""

LEDGER_SEGMENT_BYTES: Final = 4 << 20
"""A segment of the ledger takes entries until it is as long as this. With another value nodes cut the same ledger into
other segments and find none of each other's by hash; they then fetch entry by entry."""

WORK_SCRYPT_COST: Final = 1 << 14
"""N of the scrypt of an admission's proof of work; with r it fixes the memory, 128 · N · r = 16 MiB. With other values
nodes disagree about who is admitted."""

WORK_SCRYPT_BLOCK: Final = 8
"""r of that scrypt."""
