"""One call, answered by gRPC's own library and by worse."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpulet.plugin.rpc.client import call
from gpulet.plugin.rpc.framing import CallFailed


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        yield f"{folder}/s"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def library(path: str, released: threading.Event) -> Iterator[str]:
    def refuse(message: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "nicht da: 100 %")

    def wait(message: bytes, context: Any) -> bytes:
        released.wait(20)
        return b""

    methods: dict[str, Callable[[bytes, Any], bytes]] = {
        "Echo": lambda message, context: message * 2,
        "Large": lambda message, context: bytes(3 << 20),
        "Huge": lambda message, context: bytes(20 << 20),
        "Refuse": refuse,
        "Wait": wait,
    }
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, options=[("grpc.max_send_message_length", -1)])
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x.X", handlers)])
        server.add_insecure_port(f"unix:{path}")
        server.start()
        yield path
        released.set()
        server.stop(None).wait()


def asked(path: str, method: str, message: bytes = b"", timeout: float = 10) -> bytes:
    return asyncio.run(call(path, f"/x.X/{method}", message, timeout))


def failed(path: str, method: str = "Echo", timeout: float = 10) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        asked(path, method, timeout=timeout)
    return caught.value


def test_answers(library: str):
    assert asked(library, "Echo", b"abc") == b"abcabc"
    assert asked(library, "Echo") == b""
    assert asked(library, "Large") == bytes(3 << 20)


def test_refusals(library: str):
    assert str(failed(library, "Refuse")) == "NOT_FOUND: nicht da: 100 %"
    assert failed(library, "Nothing").code == "UNIMPLEMENTED"
    assert failed(library, "Huge").code == "RESOURCE_EXHAUSTED"


def test_no_answer_in_time(library: str):
    began = time.monotonic()
    assert str(failed(library, "Wait", 0.2)) == "DEADLINE_EXCEEDED: no answer within 0.2 s"
    assert time.monotonic() - began < 5


def test_cancelled(library: str):
    async def impatient() -> None:
        async with asyncio.timeout(0.2):
            await call(library, "/x.X/Wait", b"", 10)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())


def test_nobody_there(path: str):
    assert failed(path).code == "UNAVAILABLE"
    Path(path).touch()
    assert failed(path).code == "UNAVAILABLE"


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes.fromhex("000000040000000000" "000008070000000000" "00000000" "00000000"),  # SETTINGS, GOAWAY
        bytes.fromhex("000000040000000000" "000004030000000001" "00000007"),  # SETTINGS, RST_STREAM
        bytes.fromhex("000000040000000000" "000001010500000001" "8d"),  # SETTINGS, HEADERS: 404, END_STREAM
        bytes.fromhex("000000040000000000" "000001010500000001" "88"),  # SETTINGS, HEADERS: 200 and no more
    ],
)  # fmt: skip
def test_something_else_there(path: str, words: bytes):
    async def odd() -> CallFailed:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(words)
            writer.close()

        async with await asyncio.start_unix_server(speak, path):
            with pytest.raises(CallFailed) as caught:
                await call(path, "/x.X/Echo", b"", 10)
            return caught.value

    assert asyncio.run(odd()).code in ("UNAVAILABLE", "UNKNOWN")
