"""`python -m tests.support.tiny_server DIRECTORY`: a server over the tiny model as a process; it prints
its address.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.servers import RunningServer, tiny_engine

if __name__ == "__main__":
    server = RunningServer(lambda: tiny_engine(Path(sys.argv[1])))
    print(server.address, flush=True)
    server.join()
