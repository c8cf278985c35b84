"""What every node of a run must agree on: records, signatures, ids, proofs, seeds, ledger rules.

Pure: no network, no clock, no torch. Everything here can be re-implemented from docs/protocol.md.
"""
