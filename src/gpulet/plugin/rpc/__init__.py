"""gRPC as the kubelet speaks it: unary calls and one kind of stream, over HTTP/2 on a unix socket.

Why no gRPC library serves here: "The transport" in docs/architecture.md.

    framing     messages and statuses as gRPC writes them
    headers     headers, compressed
    http2       the server's side of HTTP/2: bytes in, bytes out
    connection  gRPC on it: one client's connection to our service
    listener    the socket, its connections and the one thread that serves them
    client      one call to somebody else's service
"""
