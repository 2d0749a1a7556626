"""An engine. The file `engine` in FAKE_WORLD holds what it does; `health` the status that /health answers;
once there is a file `closed`, it lives on but does not listen any more. `completes` holds the status that completions
get, or "never". `running` is the number of its requests.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_ray_engine.patches import context, placement

WORLD = Path(os.environ["FAKE_WORLD"])
# A child that outlives its parent and ignores SIGTERM, as an engine core can.
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
)


def read(name, default):
    path = WORLD / name
    return path.read_text().strip() if path.exists() else default


def parse():
    parser = FlexibleArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    for name, kind, default in [
        ("--host", str, None),
        ("--port", int, 8000),
        ("--tensor-parallel-size", int, 1),
        ("--pipeline-parallel-size", int, 1),
        ("--distributed-executor-backend", str, None),
        ("--revision", str, None),
        ("--data-parallel-size", int, 1),
        ("--data-parallel-size-local", int, None),
        ("--data-parallel-backend", str, "mp"),
        ("--shutdown-timeout", int, 0),
    ]:
        serve.add_argument(name, type=kind, default=default)
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--api-key", nargs="*")
    serve.add_argument("--middleware", action="append", default=[])
    return parser.parse_args()


def handler(args):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            keys = args.api_key or []
            status, body = int(read("health", "200")), b""
            if self.path == "/metrics":
                status, body = 200, f"vllm:num_requests_running {read('running', '0')}\n".encode()
            if self.path == "/is_paused":
                status = 404
            if self.path == "/v1/models":
                status = 200
                body = json.dumps({"data": [{"id": args.served_model_name[0]}]}).encode()
                if keys and self.headers.get("Authorization") not in [f"Bearer {key}" for key in keys]:
                    status, body = 401, b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            status = read("completes", "200")
            if status == "never":
                time.sleep(600)
            self.send_response(int(status))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    return Handler


class Server(ThreadingHTTPServer):
    def service_actions(self):
        if (WORLD / "closed").exists():
            self.server_close()
            time.sleep(600)


def end(*_):
    (WORLD / "ended").write_text("without accelerators" if (WORLD / "removed").exists() else "with accelerators")
    os._exit(0)


def main():
    args = parse()
    does = read("engine", "serve")
    print(f"(APIServer pid={os.getpid()}) INFO 11-30 08:00:00 [main.py:1] the engine does: {does}", flush=True)
    if does == "exit":
        sys.exit(3)
    if does == "error":
        print("(EngineCore pid=7) ERROR 11-30 08:00:00 [core.py:1] ValueError: the first error", flush=True)
        print("RuntimeError: Engine core initialization failed. See root cause above.", end="", flush=True)
        sys.exit(1)
    if does == "hang-importing":
        time.sleep(600)
    owner = context.from_environment()
    if owner.rank_groups:
        placement.use_rank_groups(None, owner)()
    else:
        placement.use_launcher_group(lambda _: None, owner)(SimpleNamespace(placement_group=None))
    (WORLD / "environment").write_text(json.dumps(dict(os.environ)))
    if does == "hang":
        time.sleep(600)
    subprocess.Popen([sys.executable, "-c", STUBBORN])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if does == "stubborn" else end)
    Server(("127.0.0.1", args.port), handler(args)).serve_forever()
