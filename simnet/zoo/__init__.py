"""Contributors and validators that are honest in all but one thing: `python -m simnet.zoo CHEAT [settings of a node]`.

A lie of the computation is a subclass of the inference node's worker (`workers`), run as its compute process
(`compute`); a lie to the network is a subclass of its role (`roles`, `validators`). Their names are in `simnet.cheats`.
"""
