#!/usr/bin/env python3
"""Writes one Python wheel, `keyway-gateway`, with the three programs, which pip puts beside its own into PATH.

By hand, not with maturin: its `bindings = "bin"` packages one crate at a time, and calls cargo itself, so three wheels would have
to be taken apart to give one, of programs that were not tried. A wheel is a zip of a documented layout (PEP 427)."""

import base64
import hashlib
import io
import sys
import time
import zipfile

import elf
import shared

DISTRIBUTION = "keyway_gateway"
# The first time that a zip can name: 1980-01-01.
ZIP_EPOCH = 315532800
METADATA = """\
Metadata-Version: 2.4
Name: keyway-gateway
Version: {version}
Summary: Prefix-aware routing gateway for LLM inference, with a worker and a load tester
License-Expression: Apache-2.0
License-File: LICENSE
License-File: {notices}
Keywords: llm,inference,gateway,router,vllm,sglang
Requires-Python: >=3.8
Description-Content-Type: text/markdown

# Keyway

A gateway in front of a fleet of LLM inference servers. It sends each request to the worker that already holds the KV cache of
the prompt's prefix. Clients change one base URL.

```sh
pip install keyway-gateway
keyway                 # the gateway, with two embedded CPU workers for a first try
keyway --worker http://10.0.0.7:8000 --worker http://10.0.0.8:8000
```

The package has three programs and no Python code: `keyway`, the inference worker `keyway-worker` and the load tester
`keyway-loadtest`. `--help` of each says more.
"""


def entries(stage, version, tag):
    """The files of the wheel, all but its RECORD."""
    info = f"{DISTRIBUTION}-{version.python}.dist-info"
    metadata = METADATA.format(version=version.python, notices=shared.NOTICES)
    about = f"Wheel-Version: 1.0\nGenerator: keyway-release ({version.plain})\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = [
        shared.Entry(f"{info}/METADATA", metadata.encode()),
        shared.Entry(f"{info}/WHEEL", about.encode()),
        shared.Entry(f"{info}/licenses/LICENSE", (shared.ROOT / "LICENSE").read_bytes()),
        shared.Entry(f"{info}/licenses/{shared.NOTICES}", (stage / shared.NOTICES).read_bytes()),
        # PEP 770 gives bills of materials this place.
        shared.Entry(f"{info}/sboms/{shared.SBOM}", (stage / shared.SBOM).read_bytes()),
    ]
    for program in shared.PROGRAMS:
        path = f"{DISTRIBUTION}-{version.python}.data/scripts/{program}"
        files.append(shared.Entry(path, (stage / "bin" / program).read_bytes(), 0o755))
    # Installers ask that the folder of metadata comes last.
    return sorted(files, key=lambda entry: (".dist-info/" in entry.path, entry.path))


def record(files, version):
    """RECORD: the digest and the size of every file but itself."""
    path = f"{DISTRIBUTION}-{version.python}.dist-info/RECORD"
    lines = []
    for entry in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(entry.data).digest()).rstrip(b"=").decode()
        lines.append(f"{entry.path},sha256={digest},{len(entry.data)}\n")
    return shared.Entry(path, "".join([*lines, f"{path},,\n"]).encode())


def zipped(files, epoch):
    """The files as a zip, in their order, all of one time."""
    raw = io.BytesIO()
    when = time.gmtime(max(epoch, ZIP_EPOCH))[:6]
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for entry in files:
            info = zipfile.ZipInfo(entry.path, when)
            info.create_system = 3  # Unix, whose modes follow
            info.external_attr = (0o100000 | entry.mode) << 16
            archive.writestr(info, entry.data, zipfile.ZIP_DEFLATED, 9)
    return raw.getvalue()


def main():
    args = shared.arguments(__doc__.split("\n")[0]).parse_args()
    needs = elf.of_programs(args.stage / "bin" / program for program in shared.PROGRAMS)
    tag = f"py3-none-{needs.platform()}"
    files = entries(args.stage, args.version, tag)
    files.append(record(files, args.version))
    name = f"{DISTRIBUTION}-{args.version.python}-{tag}.whl"
    (args.out / name).write_bytes(zipped(files, args.epoch))


if __name__ == "__main__":
    try:
        main()
    except (elf.Unfit, OSError) as error:
        sys.exit(str(error))
