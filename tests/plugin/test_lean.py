"""lean.py: what the daemon's imports leave out isn't there, and whoever needs it gets the real one."""

from __future__ import annotations

import subprocess
import sys


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_metrics_bring_no_servers_and_no_openssl():
    code = "import sys; from gpulet.plugin import main, metrics; print(*sys.modules); print(metrics.Metrics().registry)"
    loaded = set(said(code).split())
    assert "prometheus_client" in loaded
    assert not {"ssl", "_ssl", "_hashlib", "http.server", "http.client", "urllib.request", "email", "html"} & loaded


def test_who_needs_them_gets_the_real_ones():
    code = """
from gpulet.plugin import main, metrics
import hashlib, http.client, http.server, socketserver, ssl, urllib.error, urllib.request, wsgiref.simple_server
import urllib, http
assert issubclass(http.server.HTTPServer, socketserver.TCPServer)
assert issubclass(urllib.error.HTTPError, urllib.request.URLError)
assert http.client.HTTPSConnection("localhost", context=ssl.create_default_context()).port == 443
assert wsgiref.simple_server.WSGIServer and hashlib.new("sha256", b"").hexdigest().startswith("e3b0")
print("real")
"""
    assert said(code) == "real"


def test_what_is_loaded_already_stays():
    code = """
import http.server, ssl
before = http.server, ssl
from gpulet.plugin import metrics
import sys
assert before == (sys.modules["http.server"], sys.modules["ssl"])
print(metrics.Metrics().registry is not None)
"""
    assert said(code) == "True"
