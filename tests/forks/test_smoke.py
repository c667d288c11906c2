from pathlib import Path
import time
import trio
from .world import open_world
async def test_smoke(postgres_folder: Path, fork_template: Path) -> None:
    t=time.time()
    async with open_world(postgres_folder, fork_template, daemons=2) as world:
        print("up", time.time()-t); t=time.time()
        world.hold_all_kinds(0); world.hold_all_kinds(1)
        world.writing.go()
        await trio.sleep(3)
        t=time.time()
        await world.settle("smoke")
        print("settled", time.time()-t, world.writing.done, [h.counts() for h in world.holders]); t=time.time()
    print("down", time.time()-t)
