#!/usr/bin/env python3
"""Implements as much of vLLM's command line and HTTP interface as a front uses; prompts control it.

"die" ends the process in the middle of an answer; "hang" makes /health fail from then on.
"""

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANGS = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def whole(self, status: int, record: object) -> None:
        data = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.whole(503 if HANGS.is_set() else 200, {})
        elif self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.whole(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.whole(
                200, {"data": [{"id": OPTIONS.served_model_name, "max_model_len": OPTIONS.max_model_len}]}
            )
        else:
            self.whole(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.whole(401, {"error": "Unauthorized"})
            return
        said = body["messages"][-1]["content"]
        told = {"pid": os.getpid(), "environment": sorted(os.environ), "body": body}
        if said == "hang":
            HANGS.set()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chunks = [{"content": json.dumps(told)}, {}]
        for at, delta in enumerate(chunks):
            finish = "stop" if at == len(chunks) - 1 else None
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if said == "die":
                self.wfile.flush()
                os._exit(7)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--scheduling-policy", choices=["fcfs", "priority"], required=True)
parser.add_argument("--max-model-len", type=int, default=4096)
OPTIONS = parser.parse_args()
if OPTIONS.model == "broken":
    print("ValueError: no such model\x1b[31m", flush=True)
    sys.exit(3)
ThreadingHTTPServer((OPTIONS.host, OPTIONS.port), Handler).serve_forever()
