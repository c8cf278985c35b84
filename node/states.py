"""What a node can be doing, in one word. Shown on its status board and by every view of it."""

from typing import Final, Literal, get_args

State = Literal["starting", "waiting", "working", "evicted", "finished", "stopping"]
STATES: Final[tuple[State, ...]] = get_args(State)
