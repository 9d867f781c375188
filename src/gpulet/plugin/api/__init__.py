"""The kubelet's protocols, generated from the .proto files beside this.

protobuf has its messages twice, in C and in Python, and loads the latter even where it uses the former: 1.3 MB and
10 ms for nothing.
"""

from google.protobuf.internal import api_implementation

from gpulet.plugin.lean import without

if api_implementation.Type() != "python":
    with without("google.protobuf.internal.python_message"):
        import google.protobuf.internal.builder  # noqa: F401
