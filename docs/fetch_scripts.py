"""Fetches the scripts of others that pages carry or tests use, from npm's registry.

    python docs/fetch_scripts.py          # writes them, in the versions that are named
    python docs/fetch_scripts.py --check  # compares what is there

Reports have Vega, Vega-Lite and Vega-Embed, the server's page markdown-it; tests look for what
keeps people out of a page with axe-core, which no wheel has. Versions and hashes are those of the
`versions.json` of each folder. Nothing of it is needed to use or to test llmpq: the files are
committed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("llmpq/pictures/vega", "runtime/serve/markdown", "tests/axe")
REGISTRY = "https://registry.npmjs.org"


def fetch(package: dict[str, Any]) -> dict[str, bytes]:
    """Return the minified file and the licence of a package, whose tarball's hash is as stated."""
    name, version = package["name"], package["version"]
    url = f"{REGISTRY}/{name}/-/{name}-{version}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        data = answer.read()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package["integrity"]:
        raise SystemExit(f"{url}: got {found}, expected {package['integrity']}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        script = archive.extractfile(f"package/{package['file']}")
        licence = archive.extractfile("package/LICENSE")
        assert script is not None and licence is not None
        text = script.read().split(b"\n//# sourceMappingURL")[0].strip() + b"\n"
        return {f"{name}.min.js": text, f"LICENSE-{name}.txt": licence.read()}


def main() -> int:
    """Write or compare the files; the exit code is 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    differing = []
    for folder in FOLDERS:
        for package in json.loads((ROOT / folder / "versions.json").read_text())["packages"]:
            for name, data in fetch(package).items():
                path = ROOT / folder / name
                if path.exists() and path.read_bytes() == data:
                    continue
                differing.append(name)
                if not args.check:
                    path.write_bytes(data)
    sys.stdout.write(f"{'different' if args.check else 'written'}: {', '.join(differing) or '-'}\n")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
