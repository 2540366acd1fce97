"""How worker processes share out the tests (`-n 2`)."""

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

OF_RAY = "tests/end_to_end/"


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests run on one worker, and all tests that start Ray on the one with the first.

    Those wait for processes more than they compute, so the other worker has the cores meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        return OF_RAY if nodeid.startswith(OF_RAY) else nodeid.split("::", 1)[0]

    def remove_node(self, node: WorkerController) -> str | None:
        """Give what a crashed worker has left to others; returns the test that it ran.

        xdist gives that test to the next worker too, and files that were completed: a worker that
        gets those alone has nothing to report, so it gets no more, and waits for ever.
        """
        work = self.assigned_work.pop(node)
        left = {
            scope: [n for n, done in tests.items() if not done] for scope, tests in work.items()
        }
        scope = next((scope for scope, tests in left.items() if tests), None)
        if scope is None:
            return None
        crashed: str = left[scope][0]
        work[scope][crashed] = True
        self.workqueue.update({s: tests for s, tests in work.items() if not all(tests.values())})
        self.schedule()
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile | None:
    """Share out by scope, in the order of collection; `--dist worksteal` test by test."""
    if config.option.dist == "worksteal":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)
