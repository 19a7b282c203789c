"""The engine's process: `python -m nearfar.fallback_server.torch_engine.worker SOCKET_NUMBER`."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import Literal

import torch
import transformers

from nearfar.errors import CheckpointError, DeviceError
from nearfar.fallback_server.framing import ByteSource
from nearfar.fallback_server.torch_engine.engine import LoadedGrammar, TorchEngine
from nearfar.fallback_server.torch_engine.messages import (
    BEAT,
    FromWorker,
    Ready,
    Shutdown,
    Start,
    ToWorker,
    Unfit,
    encode,
    receive,
)
from nearfar.fallback_server.torch_engine.model import load_model, make_cache
from nearfar.processors import within_quota


def main() -> None:
    """Load what the first message names, then serve until told to end or the parent is gone."""
    # The server drains requests and then ends this process: a signal to all processes must not end it
    # earlier.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    connection = socket.socket(fileno=int(sys.argv[1]))
    source = connection.makefile("rb")
    start = receive(source)
    assert isinstance(start, Start)
    inbox: queue.SimpleQueue[ToWorker | LoadedGrammar] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, inbox), daemon=True).start()
    options = start.options
    torch.set_num_threads(options.threads or within_quota(torch.get_num_threads()))

    def emit(message: FromWorker) -> None:
        try:
            connection.sendall(encode(message))
        except ConnectionError:
            os._exit(0)

    try:
        model = load_model(start.path, options)
        engine = TorchEngine(model, make_cache(model, options), start.path, options, emit, inbox.put)
    except (CheckpointError, DeviceError) as error:
        kind: Literal["CheckpointError", "DeviceError"] = (
            "CheckpointError" if isinstance(error, CheckpointError) else "DeviceError"
        )
        emit(Unfit(kind, str(error)))
        return
    emit(Ready(engine.info))
    while _take_in(engine, inbox):
        engine.turn()
    engine.close()


def _take_in(engine: TorchEngine, inbox: queue.SimpleQueue[ToWorker | LoadedGrammar]) -> bool:
    """Handle the messages that have arrived; wait for the next while there is nothing to compute. Returns
    False when it is time to end.
    """
    while True:
        try:
            message = inbox.get(block=not engine.busy, timeout=BEAT)
        except queue.Empty:
            return True
        if isinstance(message, Shutdown):
            return False
        assert not isinstance(message, Start)
        engine.handle(message)


def _read(source: ByteSource, inbox: queue.SimpleQueue[ToWorker | LoadedGrammar]) -> None:
    while (message := receive(source)) is not None:
        inbox.put(message)
    os._exit(0)  # the parent is gone: no request waits for its result, not even for this step's


if __name__ == "__main__":
    main()
