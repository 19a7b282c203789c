"""`python -m tests.support.tiny_server DIRECTORY [--strict]`: a server over the tiny model as a process; it
prints its address.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nearfar.fallback_server.http.app import AppOptions
from tests.support.servers import RunningServer, tiny_engine

if __name__ == "__main__":
    options = AppOptions(strict_fields="--strict" in sys.argv)
    server = RunningServer(lambda: tiny_engine(Path(sys.argv[1])), options)
    print(server.address, flush=True)
    server.join()
