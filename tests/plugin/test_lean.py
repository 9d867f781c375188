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


def test_protobuf_without_its_messages_in_python():
    code = """
import sys
from gpulet.plugin.api import deviceplugin_pb2 as pb
from google.protobuf.internal import api_implementation
assert ("google.protobuf.internal.python_message" in sys.modules) == (api_implementation.Type() == "python")
one = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a"])])
assert pb.AllocateRequest.FromString(one.SerializeToString()) == one and "devices_ids" in str(one)
from google.protobuf import json_format, text_format
from google.protobuf.internal import python_message
assert python_message.GeneratedProtocolMessageType
print(json_format.MessageToDict(one), text_format.MessageToString(one) == str(one))
"""
    assert said(code) == "{'containerRequests': [{'devicesIds': ['a']}]} True"


def test_protobuf_in_python_alone():
    """Where there is no C library for it, everything is there."""
    code = """
import os
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
from gpulet.plugin.api import deviceplugin_pb2 as pb
print(pb.Device(ID="a").SerializeToString())
"""
    assert said(code) == repr(b"\n\x01a")


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


def test_threads_share_one_heap():
    """malloc_info(3) lists the heaps; each thread's allocations beyond Python's own are the C library's."""
    code = """
import ctypes, sys, threading
from gpulet.plugin.lean import one_arena
if len(sys.argv) > 1:
    one_arena()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
begun = threading.Barrier(4)
def work():
    kept = bytearray(10_000)
    begun.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stream)
libc.fflush(stream)
"""
    heaps = [
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
        for words in ([], ["one"])
    ]
    assert [text.count("<heap nr=") > 1 for text in heaps] == [True, False]
