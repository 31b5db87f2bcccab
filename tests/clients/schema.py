"""Requests made from the OpenAPI document: `schema.py N` sends about N to each operation and fails at any surprise."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import Server


def main():
    server = Server("--max-tokens", "4", "--max-context", "1024")
    tool = Path(sys.executable).with_name("schemathesis")
    command = [tool, "run", f"{server.url}/openapi.json", "--exclude-checks", "positive_data_acceptance"]
    command += ["--max-examples", *sys.argv[1:]]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(Path(__file__).parent)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        assert server.get("/health").status_code == 200, "the server is no longer well"
    finally:
        server.stop()
    sys.exit(code)


if __name__ == "__main__":
    main()
