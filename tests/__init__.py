"""The tests. Ray starts where a test starts it: no call of its API in a test's process may."""

import os

# Ray would start a cluster at the first call, and end this process when that cluster ends.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
