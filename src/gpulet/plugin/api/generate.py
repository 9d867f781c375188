"""Regenerate the Python of the .proto files: `python -m gpulet.plugin.api.generate`. Needs grpcio-tools."""

from __future__ import annotations

import sys
from pathlib import Path

PROTOCOLS = ("deviceplugin", "podresources")


def main() -> int:
    """Write *_pb2.py and *_pb2_grpc.py beside each .proto."""
    from grpc_tools import protoc

    here = Path(__file__).parent
    outputs = [f"--{kind}_out={here}" for kind in ("python", "grpc_python")]
    for name in PROTOCOLS:
        status = int(protoc.main(["protoc", f"-I{here}", *outputs, str(here / f"{name}.proto")]))
        if status:
            return status
        # protoc writes the import as if its output folder stood on sys.path
        stub = here / f"{name}_pb2_grpc.py"
        plain = f"import {name}_pb2 as {name}__pb2"
        stub.write_text(stub.read_text().replace(f"\n{plain}", f"\nfrom gpulet.plugin.api {plain}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
