"""What every kind of package shares: names and summaries, the forms of a version, archives whose bytes depend on nothing but
what is in them."""

import argparse
import dataclasses
import gzip
import io
import pathlib
import re
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = {
    "keyway": "routing gateway for fleets of LLM inference servers",
    "keyway-worker": "OpenAI-compatible LLM inference worker",
    "keyway-loadtest": "load tester and simulated fleet for LLM servers",
}
NOTICES = "THIRD-PARTY-NOTICES.txt"
SBOM = "keyway.cdx.json"
SEMVER = re.compile(r"(\d+\.\d+\.\d+)(?:-([0-9A-Za-z.]+))?(?:\+([0-9A-Za-z.]+))?")
PRE_RELEASE = re.compile(r"(alpha|beta|rc)\.(\d+)")


@dataclasses.dataclass(frozen=True)
class Version:
    """A version in its three forms: SemVer, Python's (PEP 440) and Debian's."""

    plain: str
    python: str
    debian: str

    @classmethod
    def parse(cls, text):
        """Reads SemVer; a pre-release is alpha.N, beta.N or rc.N. Raises ValueError."""
        whole = SEMVER.fullmatch(text)
        before = PRE_RELEASE.fullmatch(whole[2]) if whole and whole[2] else None
        if not whole or (whole[2] and not before):
            raise ValueError(f"{text} is no version such as 1.2.3, 1.2.3-rc.1 or 1.2.3+build")
        of_build = f"+{whole[3]}" if whole[3] else ""
        short = {"alpha": "a", "beta": "b", "rc": "rc"}
        python = whole[1] + (f"{short[before[1]]}{before[2]}" if before else "") + of_build.lower()
        debian = whole[1] + (f"~{whole[2]}" if before else "") + of_build
        return cls(text, python, debian)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of an archive: its path there, its bytes, its mode."""

    path: str
    data: bytes
    mode: int = 0o644


def compressed(data, epoch=0):
    """The bytes as gzip, which names no file; `epoch` is its time in seconds since 1970."""
    return gzip.compress(data, compresslevel=9, mtime=epoch)


def tar_gz(entries, epoch):
    """A compressed tar of the entries, sorted, all of root and of one time."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for entry in sorted(entries, key=lambda entry: entry.path):
            info = tarfile.TarInfo(entry.path)
            info.size, info.mode, info.mtime = len(entry.data), entry.mode, epoch
            info.uname = info.gname = "root"
            archive.addfile(info, io.BytesIO(entry.data))
    return compressed(raw.getvalue(), epoch)


def version(text):
    """A version among a command's arguments."""
    try:
        return Version.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments(description, *, stage=True):
    """The arguments that each script of this folder takes."""
    parser = argparse.ArgumentParser(description=description, epilog="deploy/release.sh calls this with all it needs.")
    if stage:
        parser.add_argument("--stage", type=pathlib.Path, required=True, metavar="DIR",
                            help="what release.sh has put together: bin/, completions/, man/, notices, bill of materials")
        parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="where packages go")
    parser.add_argument("--version", type=version, required=True, metavar="V", help="SemVer")
    parser.add_argument("--epoch", type=int, required=True, metavar="SECONDS", help="the time that everything gets, since 1970")
    return parser
