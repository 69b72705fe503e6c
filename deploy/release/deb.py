#!/usr/bin/env python3
"""Writes Debian packages of the three programs, with dpkg-deb: systemd units and configuration for the gateway and the worker.

What they need of the C library is read from the programs. Services run as users of their own by systemd's DynamicUser."""

import dataclasses
import email.utils
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import elf
import shared

DEBIAN = pathlib.Path(__file__).resolve().parent / "debian"
SYSTEMD = shared.ROOT / "deploy/systemd"
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: Keyway
Comment: The program has code of other packages in it. Their licences are in NOTICES.gz beside this file.

Files: *
Copyright: {year} The Keyway authors
License: Apache-2.0
 On Debian systems, the text of the Apache License, version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """One package: its program, its description, units of systemd, and its configuration's place with the file it comes from."""

    name: str
    text: tuple
    units: tuple = ()
    configuration: tuple = ()
    suggests: tuple = ()


PACKAGES = (
    Package(
        "keyway",
        ("Keyway sends each request to the worker that already holds the KV cache of", "the prompt's prefix. Clients change one base URL.",
         "", "Workers are vLLM, SGLang or keyway-worker. Without any it starts two", "small ones of its own, for a first try."),
        ("keyway.service", "keyway.socket"),
        ("etc/keyway/keyway.toml", shared.ROOT / "deploy/keyway.toml"),
        ("keyway-worker", "keyway-loadtest"),
    ),
    Package(
        "keyway-worker",
        ("Serves a model of the Hugging Face format on processors and NVIDIA GPUs,", "with batching, a paged KV cache and prefix caching."),
        ("keyway-worker.service",),
        ("etc/keyway/worker.env", DEBIAN / "worker.env"),
    ),
    Package(
        "keyway-loadtest",
        ("Sends workloads on schedule to servers with OpenAI's or Anthropic's API and", "reports times, caches and errors. "
         "It also simulates fleets of engines."),
    ),
)


def installed(package, stage, version, epoch, maintainer):
    """The files of a package, by their places on a machine."""
    name, root = package.name, shared.ROOT
    documents = f"usr/share/doc/{name}"
    when = email.utils.formatdate(epoch).replace("-0000", "+0000")
    changes = (f"{name} ({version.debian}) unstable; urgency=medium\n\n  * What changed is in CHANGELOG.md.gz beside this file.\n\n"
               f" -- {maintainer}  {when}\n")
    files = [
        shared.Entry(f"usr/bin/{name}", (stage / "bin" / name).read_bytes(), 0o755),
        shared.Entry(f"{documents}/copyright", COPYRIGHT.format(year=time.gmtime(epoch).tm_year).encode()),
        shared.Entry(f"{documents}/changelog.gz", shared.compressed(changes.encode())),
        shared.Entry(f"{documents}/CHANGELOG.md.gz", shared.compressed((root / "CHANGELOG.md").read_bytes())),
        shared.Entry(f"{documents}/README.md", (root / "README.md").read_bytes()),
        shared.Entry(f"{documents}/NOTICES.gz", shared.compressed((stage / shared.NOTICES).read_bytes())),
        shared.Entry(f"usr/share/man/man1/{name}.1.gz", shared.compressed((stage / "man" / f"{name}.1").read_bytes())),
    ]
    for place, file in (("bash-completion/completions/{}", "{}.bash"), ("zsh/vendor-completions/_{}", "_{}"),
                        ("fish/vendor_completions.d/{}.fish", "{}.fish")):
        text = (stage / "completions" / file.format(name)).read_bytes()
        files.append(shared.Entry(f"usr/share/{place.format(name)}", text))
    for unit in package.units:
        text = (SYSTEMD / unit).read_text(encoding="utf-8")
        text = text.replace("/usr/local/bin/", "/usr/bin/").replace("/usr/share/doc/keyway/", f"/{documents}/")
        files.append(shared.Entry(f"usr/lib/systemd/system/{unit}", text.encode()))
    if package.configuration:
        place, source = package.configuration
        files.append(shared.Entry(place, source.read_bytes()))
    return files


def control(package, files, version, needs, maintainer):
    """What dpkg is told of a package."""
    kibibytes = sum(-(-len(entry.data) // 1024) for entry in files)
    fields = [
        f"Package: {package.name}",
        f"Version: {version.debian}",
        f"Architecture: {needs.debian}",
        f"Maintainer: {maintainer}",
        f"Installed-Size: {kibibytes}",
        f"Depends: {needs.depends()}",
        *([f"Suggests: {', '.join(package.suggests)}"] if package.suggests else []),
        "Section: net",
        "Priority: optional",
        f"Description: {shared.PROGRAMS[package.name]}",
        *(f" {line}" if line else " ." for line in package.text),
    ]
    whole = [shared.Entry("DEBIAN/control", ("\n".join(fields) + "\n").encode())]
    kept = package.configuration[:1]
    if kept:
        whole.append(shared.Entry("DEBIAN/conffiles", f"/{kept[0]}\n".encode()))
    digests = [f"{hashlib.md5(entry.data, usedforsecurity=False).hexdigest()}  {entry.path}\n"
               for entry in sorted(files, key=lambda entry: entry.path) if entry.path not in kept]
    whole.append(shared.Entry("DEBIAN/md5sums", "".join(digests).encode()))
    if package.units:
        for script in ("postinst", "prerm", "postrm"):
            text = (DEBIAN / script).read_text(encoding="utf-8").replace("@UNITS@", " ".join(package.units))
            whole.append(shared.Entry(f"DEBIAN/{script}", text.encode(), 0o755))
    return whole


def laid_out(folder, files, epoch):
    """Writes the files below a folder; modes and times are given to all, folders too."""
    for entry in files:
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.data)
        path.chmod(entry.mode)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch, epoch))


def built(folder, target, epoch):
    """Lets dpkg-deb pack a folder."""
    # One thread: the bytes of more than one depend on how many there are.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "DPKG_DEB_THREADS_MAX": "1"}
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(folder), str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def main():
    parser = shared.arguments(__doc__.split("\n")[0])
    parser.add_argument("--maintainer", required=True, metavar="'NAME <ADDRESS>'")
    args = parser.parse_args()
    for package in PACKAGES:
        needs = elf.of_program(args.stage / "bin" / package.name)
        files = installed(package, args.stage, args.version, args.epoch, args.maintainer)
        files += control(package, files, args.version, needs, args.maintainer)
        target = args.out / f"{package.name}_{args.version.debian}_{needs.debian}.deb"
        work = pathlib.Path(tempfile.mkdtemp())
        try:
            laid_out(work / "root", files, args.epoch)
            built(work / "root", target, args.epoch)
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"dpkg-deb: {error.stderr.strip() or error}")
    except (elf.Unfit, OSError) as error:
        sys.exit(str(error))
