#!/usr/bin/env python3
"""Writes a tarball of the programs with all that belongs to them, and the Helm chart as an archive.

The chart's archive has the layout that `helm package` writes, but not the time of its making; so no helm is needed either."""

import re
import sys

import elf
import shared


def below(folder, prefix):
    """Every file below a folder, its path put under `prefix`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [shared.Entry(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in files]


def tarball(stage, top):
    """The files of the tarball, all below the folder `top`."""
    root = shared.ROOT
    files = [shared.Entry(f"{top}/bin/{program}", (stage / "bin" / program).read_bytes(), 0o755) for program in shared.PROGRAMS]
    for path in (root / "LICENSE", root / "README.md", root / "CHANGELOG.md", root / "deploy/keyway.toml",
                 stage / shared.NOTICES, stage / shared.SBOM):
        files.append(shared.Entry(f"{top}/{path.name}", path.read_bytes()))
    for folder in (stage / "completions", stage / "man", root / "deploy/systemd"):
        files += below(folder, f"{top}/{folder.name}")
    return files


def chart(version):
    """The files of the chart, which says this version and starts images of it."""
    files = []
    for entry in below(shared.ROOT / "deploy/helm/keyway", "keyway"):
        if entry.path == "keyway/Chart.yaml":
            text, count = re.subn(r"(?m)^(version|appVersion): .*$", rf"\1: {version.plain}", entry.data.decode())
            if count != 2:
                raise ValueError("Chart.yaml: one line with version and one with appVersion are wanted")
            entry = shared.Entry(entry.path, text.encode())
        files.append(entry)
    return files


def main():
    args = shared.arguments(__doc__.split("\n")[0]).parse_args()
    needs = elf.of_programs(args.stage / "bin" / program for program in shared.PROGRAMS)
    top = f"keyway-{args.version.plain}-{needs.machine}-linux-gnu"
    (args.out / f"{top}.tar.gz").write_bytes(shared.tar_gz(tarball(args.stage, top), args.epoch))
    (args.out / f"keyway-{args.version.plain}.tgz").write_bytes(shared.tar_gz(chart(args.version), args.epoch))


if __name__ == "__main__":
    try:
        main()
    except (elf.Unfit, OSError, ValueError) as error:
        sys.exit(str(error))
