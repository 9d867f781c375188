"""The kubelet's end of one plugin's socket: a channel, and the thread that reads its list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc

CALL_BACK_TIMEOUT = 10.0  # seconds the kubelet waits for a plugin's socket


class Endpoint:
    """A plugin that has registered. on_list: called with this endpoint and each ListAndWatchResponse; on_end: called
    once when the stream has ended, whatever the reason. Both from the endpoint's own thread."""

    def __init__(
        self,
        path: Path,
        resource: str,
        on_list: Callable[[Endpoint, Any], None],
        on_end: Callable[[Endpoint], None],
    ) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        self.channel = grpc.insecure_channel(f"unix:{path}", options=options)
        self.resource = resource
        self.stub = rpc.DevicePluginStub(self.channel)
        self.options: Any = None
        self.stopped = False
        self._on_list, self._on_end = on_list, on_end
        self._stream: Any = None
        self._turn = threading.Lock()  # opening and closing may meet when the kubelet stops during a registration
        self._closed = False
        self._thread = threading.Thread(target=self._read, name=f"kubelet-{resource}", daemon=True)

    def open(self) -> None:
        """Ask for the options and open the stream. Raises grpc.RpcError."""
        self.options = self.stub.GetDevicePluginOptions(pb.Empty(), timeout=CALL_BACK_TIMEOUT, wait_for_ready=True)
        with self._turn:
            if self._closed:
                return
            self._stream = self.stub.ListAndWatch(pb.Empty())
            self._thread.start()

    def _read(self) -> None:
        try:
            for message in self._stream:
                self._on_list(self, message)
        except grpc.RpcError:
            pass  # the end of a stream says the same, whatever its reason
        finally:
            self.stopped = True
            self._on_end(self)

    def close(self) -> None:
        """End the stream and wait for its thread."""
        with self._turn:
            self._closed = True
            stream = self._stream
        if stream is not None:
            stream.cancel()
            self._thread.join(5)
        self.channel.close()
