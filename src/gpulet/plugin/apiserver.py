"""The little of the Kubernetes API that we use, over HTTPS as the Pod's service account.

A client library would cost tens of megabytes for three kinds of request. TLS is loaded with the first of them: it is
the larger part of what this module costs, and on a healthy node nothing has to be said.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpulet.errors import GpuletError

if TYPE_CHECKING:
    import http.client

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TIMEOUT = 10.0  # seconds for one answer
WATCH_SECONDS = 300  # the server ends a watch then, and we begin another


class ApiError(GpuletError):
    """The API server can't be reached or refuses. code: the HTTP status, 0 where there was no answer; pause: seconds
    that it wants to be left alone for."""

    def __init__(self, what: str, code: int = 0, *, seen: object = None, pause: float = 0) -> None:
        super().__init__(what, seen=seen)
        self.code, self.pause = code, pause

    @property
    def passes(self) -> bool:
        """Whether the same request may be answered later: all but what the request itself is refused for."""
        return not 400 <= self.code < 500 or self.code in (408, 429)  # Request Timeout, Too Many Requests


class ApiServer:
    """One API server. url: "https://host:port"; token, authority: paths of files, read for each request, since the
    kubelet replaces a token every hour; "" for none. Raises ApiError for a URL that can't be one."""

    def __init__(self, url: str, token: str = "", authority: str = "") -> None:
        self.url, self._token, self._authority = url, token, authority
        try:
            self._place, self._port = urlsplit(url), urlsplit(url).port
        except ValueError as error:
            raise ApiError(f"{url} is no API server's address", seen=error) from error

    def get(self, path: str) -> Any:
        """An object. Raises ApiError."""
        return self.send("GET", path)

    def send(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer's object. Raises ApiError."""
        import http.client

        connection = self._connect(TIMEOUT)
        try:
            with self._response(connection, method, path, body, kind) as response:
                return json.loads(response.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed(method, path, error) from error
        finally:
            connection.close()

    def watch(self, path: str) -> Iterator[Any]:
        """The events of a watch, until the server or the silence of WATCH_SECONDS ends it. Raises ApiError."""
        import http.client

        connection = self._connect(WATCH_SECONDS + TIMEOUT)
        try:
            with self._response(connection, "GET", f"{path}&watch=true&timeoutSeconds={WATCH_SECONDS}") as response:
                while line := response.readline():
                    yield json.loads(line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed("WATCH", path, error) from error
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        import http.client
        import ssl

        host = self._place.hostname or ""
        if self._place.scheme == "http":
            return http.client.HTTPConnection(host, self._port, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=self._authority or None)
        except OSError as error:
            raise ApiError(f"the API server's authority {self._authority} can't be used", seen=error) from error
        return http.client.HTTPSConnection(host, self._port, timeout=timeout, context=context)

    def _response(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "gpulet"}
        if self._token:
            with open(self._token, encoding="ascii") as stream:
                headers["Authorization"] = f"Bearer {stream.read().strip()}"
        if body is not None:
            headers["Content-Type"] = kind
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 300:
            said = response.read()[:300].decode(errors="replace")
            raise ApiError(
                f"{method} {path}: {response.status} {response.reason}",
                response.status,
                seen=said or None,
                pause=_seconds(response.getheader("Retry-After", "")),
            )
        return response

    def _failed(self, method: str, path: str, error: Exception) -> ApiError:
        return ApiError(f"{method} {path} of the API server {self.url} failed", seen=error)


def _seconds(text: str) -> float:
    """Of a Retry-After (RFC 9110, 10.2.3), whose other form, a date, the API server doesn't use."""
    return float(text) if text.isascii() and text.isdigit() else 0


def in_cluster(environ: Mapping[str, str], folder: str = "") -> ApiServer | None:
    """The API server that this Pod was told of, None outside a cluster or without a service account (its folder).
    Raises ApiError for an address that can't be one."""
    folder = folder or SERVICE_ACCOUNT
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = os.path.join(folder, "token")
    if not host or not os.path.exists(token):
        return None
    host = f"[{host}]" if ":" in host else host
    return ApiServer(f"https://{host}:{port}", token, os.path.join(folder, "ca.crt"))
