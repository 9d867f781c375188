"""A stand-in for the Kubernetes API server on loopback: one node with labels, and Events."""

from __future__ import annotations

import contextlib
import json
import queue
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Cluster:
    """What the server knows; `failing`: the status that everything is refused with, 0 for none."""

    def __init__(self, node: str):
        self.node, self.labels, self.version = node, {}, 1
        self.events: dict[str, dict] = {}
        self.tokens: list[str] = []
        self.failing, self.retry_after = 0, ""
        self.lock = threading.Condition()
        self.watches: list[queue.SimpleQueue] = []
        self.url = ""

    def label(self, **labels):
        """Change the node's labels: a name's "_" stands for "/", None takes it away."""
        with self.lock:
            for name, value in labels.items():
                self.labels[name.replace("_", "/")] = value
            self.labels = {name: value for name, value in self.labels.items() if value is not None}
            self.version += 1
            for watch in self.watches:
                watch.put({"type": "MODIFIED", "object": self.object()})

    def end_watches(self, change=None):
        """End them, or give them something else before."""
        with self.lock:
            for watch in self.watches:
                watch.put(change)
                watch.put(None)

    def object(self):
        meta = {"name": self.node, "labels": dict(self.labels), "resourceVersion": str(self.version)}
        return {"kind": "Node", "metadata": meta}

    def reasons(self):
        with self.lock:
            return [event["reason"] for event in self.events.values()]


def _handler(cluster):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After", cluster.retry_after)
            self.end_headers()
            self.wfile.write(data)

        def admitted(self):
            cluster.tokens.append(self.headers.get("Authorization", ""))
            if cluster.failing:
                self.answer(cluster.failing, {"message": "no"})
            return not cluster.failing

        def do_GET(self):
            place = urlsplit(self.path)
            asked = parse_qs(place.query)
            if not self.admitted():
                return
            if place.path != "/api/v1/nodes" or asked["fieldSelector"] != [f"metadata.name={cluster.node}"]:
                self.answer(404, {})
            elif "watch" in asked:
                self.watch()
            else:
                with cluster.lock:
                    body = {"items": [cluster.object()], "metadata": {"resourceVersion": str(cluster.version)}}
                self.answer(200, body)

        def watch(self):
            changes = queue.SimpleQueue()
            with cluster.lock:
                cluster.watches.append(changes)
                cluster.lock.notify_all()
            self.send_response(200)
            self.end_headers()
            while (change := changes.get()) is not None:
                with contextlib.suppress(OSError):
                    self.wfile.write(json.dumps(change).encode() + b"\n")
                    self.wfile.flush()
            with cluster.lock:
                cluster.watches.remove(changes)

        def body(self):
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def do_POST(self):
            event = self.body()
            if self.path != f"/api/v1/namespaces/{event['metadata']['namespace']}/events":
                self.answer(400, {"message": "the namespace of the object doesn't match the request's"})
            elif self.admitted():
                with cluster.lock:
                    cluster.events[event["metadata"]["name"]] = event
                    cluster.lock.notify_all()
                self.answer(201, event)

        def do_PATCH(self):
            change = self.body()
            if self.admitted():
                with cluster.lock:
                    event = cluster.events.get(self.path.rpartition("/")[2])
                    if event:
                        event.update(change)
                self.answer(200 if event else 404, event or {})

    return Handler


@contextlib.contextmanager
def api_server(node="node-1", certificate=None):
    """A Cluster that answers at its `url`. certificate: (certificate, key) files for HTTPS."""
    cluster = Cluster(node)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    server.daemon_threads = True
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    cluster.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="api-server")
    thread.start()
    try:
        yield cluster
    finally:
        cluster.end_watches()
        server.shutdown()
        server.server_close()
        thread.join()


def self_signed(folder):
    """(certificate, key) for 127.0.0.1, made by openssl."""
    certificate, key = folder / "ca.crt", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
