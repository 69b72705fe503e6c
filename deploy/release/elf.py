#!/usr/bin/env python3
"""Says what a machine must have to run programs, as their own tables tell: processor, glibc, libgcc."""

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

# What `readelf` calls a processor, and what wheels and Debian do.
MACHINES = {"Advanced Micro Devices X86-64": ("x86_64", "amd64"), "AArch64": ("aarch64", "arm64")}
# What every machine of a manylinux tag has (PEP 600), as far as Rust's programs ask for it.
LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1",
             "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


class Unfit(Exception):
    """A program that cannot be packaged, and why."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What programs need: `machine` as wheels name it, `debian` as Debian does, and the least versions of two libraries, as
    tuples of numbers; `libgcc` is empty where they need none."""

    machine: str
    debian: str
    glibc: tuple
    libgcc: tuple

    def platform(self):
        """The platform tag of a wheel (PEP 600)."""
        return f"manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"

    def depends(self):
        """The field `Depends` of a Debian package."""
        libgcc = list(self.libgcc)
        while len(libgcc) > 2 and libgcc[-1] == 0:
            libgcc.pop()
        needed = [("libc6", self.glibc[:2]), ("libgcc-s1", libgcc)]
        return ", ".join(f"{name} (>= {'.'.join(map(str, version))})" for name, version in needed if version)


def newest(text, kind):
    """The newest version of a library's symbols that a program asks for; empty if none."""
    found = re.findall(rf"Name: {kind}_(\d+(?:\.\d+)+)\s", text)
    versions = [tuple(map(int, version.split("."))) for version in found]
    # Relative relocations in their packed form have no version of their own.
    if kind == "GLIBC" and "Name: GLIBC_ABI_DT_RELR " in text:
        versions.append((2, 36))
    return max(versions, default=())


def of_program(path):
    """What one program needs."""
    command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", "--notes", str(path)]
    read = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if read.returncode:
        raise Unfit(f"{path}: {read.stderr.strip() or 'readelf fails'}")
    text = read.stdout
    machine = re.search(r"^\s*Machine:\s*(.*?)\s*$", text, re.MULTILINE)
    if not machine or machine[1] not in MACHINES:
        raise Unfit(f"{path}: is for {machine[1] if machine else 'no processor'}, not for one of: {', '.join(MACHINES)}")
    foreign = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)) - LIBRARIES
    if foreign:
        raise Unfit(f"{path}: needs {', '.join(sorted(foreign))}, which a clean machine may lack")
    level = re.search(r"x86 ISA needed:.*(x86-64-v[2-9])", text)
    if level:
        raise Unfit(f"{path}: needs a processor of {level[1]}, which no package can say: build it with TARGET_CPU=x86-64")
    glibc = newest(text, "GLIBC")
    if not glibc:
        raise Unfit(f"{path}: names no version of glibc")
    return Needs(*MACHINES[machine[1]], glibc, newest(text, "GCC"))


def of_programs(paths):
    """What all of these programs need together."""
    needs = [of_program(path) for path in paths]
    machines = {each.machine for each in needs}
    if len(machines) != 1:
        raise Unfit(f"programs for one processor are wanted, these are for {', '.join(sorted(machines)) or 'none'}")
    return Needs(needs[0].machine, needs[0].debian, max(each.glibc for each in needs), max(each.libgcc for each in needs))


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="Needs readelf, of binutils.")
    parser.add_argument("program", nargs="+", type=pathlib.Path)
    needs = of_programs(parser.parse_args().program)
    print(f"{needs.machine}, glibc {'.'.join(map(str, needs.glibc))} or newer")


if __name__ == "__main__":
    try:
        main()
    except Unfit as error:
        sys.exit(str(error))
