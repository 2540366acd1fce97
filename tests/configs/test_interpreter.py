"""Collections of a process that serves."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from configs.interpreter import freeze_objects

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
kept, garbage = [Node() for _ in range(1_000)], cycle()
freeze_objects()
assert garbage() is None, "garbage was frozen"
assert gc.get_freeze_count() > 1_000
assert not any(isinstance(each, Node) for each in gc.get_objects()), "collections visit them"
later = cycle()
gc.collect()
assert later() is None, "later garbage is kept"
print("done")
"""


def test_objects_of_a_start_are_frozen_and_garbage_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
