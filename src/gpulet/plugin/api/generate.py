"""Regenerate the Python of deviceplugin.proto: `python -m gpulet.plugin.api.generate`. Needs grpcio-tools."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Write deviceplugin_pb2.py and deviceplugin_pb2_grpc.py beside the .proto."""
    from grpc_tools import protoc

    here = Path(__file__).parent
    outputs = [f"--{kind}_out={here}" for kind in ("python", "grpc_python")]
    status = int(protoc.main(["protoc", f"-I{here}", *outputs, str(here / "deviceplugin.proto")]))
    if status == 0:
        # protoc writes the import as if its output folder stood on sys.path
        stub = here / "deviceplugin_pb2_grpc.py"
        plain = "import deviceplugin_pb2 as deviceplugin__pb2"
        stub.write_text(stub.read_text().replace(plain, f"from gpulet.plugin.api {plain}"))
    return status


if __name__ == "__main__":
    sys.exit(main())
