"""An HTTP server of a test, which answers every POST in the same way."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers with `reply(request)`; keeps paths, headers, requests, and how many ran at once at most."""

    request_queue_size = 128  # with 5, a busy machine resets connections that come at once

    def __init__(self, reply, status: int = 200, content_type: str = "application/json"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.status, self.content_type = reply, status, content_type
        self.paths, self.headers, self.requests, self.running, self.most = [], [], [], 0, 0
        self.lock, self.url = threading.Lock(), f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.paths.append(self.path)
            server.headers.append(self.headers)
            server.requests.append(request)
            server.running += 1
            server.most = max(server.most, server.running)
        body = server.reply(request)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with server.lock:
            server.running -= 1
        self.send_response(server.status)
        self.send_header("Content-Type", server.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_):
        return
