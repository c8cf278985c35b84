"""Contributors without an engine of their own: `python -m simnet.light ENGINE EVERY_S [settings of an inference node]`.

Real inference nodes whose answers come, valid proofs and all, from one engine that they share (`shared_compute`): many
fit on a machine, and what is measured of them is the network. Rollouts that were recorded once would not do, for each
one's seed depends on the contributor's key and on the trainer's signature under the policy. Left out is what
generating costs a node in time and memory.
"""
