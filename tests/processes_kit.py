"""Two processes that know each other by gloo, forked so that nothing need be imported again."""

import json
import os
import traceback

import torch.distributed as dist

from trainer.parallel import World


def in_two_processes(work, tmp_path):
    """Run `work(world)` in two children; what each gave, as JSON."""
    children = [_child(work, rank, tmp_path) for rank in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]


def _child(work, rank, tmp_path):
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        (tmp_path / f"found-{rank}").write_text(json.dumps(work(World(rank, 2))))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
