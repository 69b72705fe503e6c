#!/usr/bin/env python3
"""Writes the licences of all that Keyway's programs are built from, with their texts, as those licences ask for.

What cargo resolves for the programs on this platform is read from their sources, which cargo has fetched for a build; nothing is
downloaded. A package without a licence, or whose licence has a text that is nowhere, ends this with status 1."""

import argparse
import collections
import json
import pathlib
import subprocess
import sys

PROGRAMS = "keyway", "keyway-worker", "keyway-loadtest"
# Files that packages keep licences and notices in, by their beginnings.
NAMES = "license", "licence", "copying", "copyright", "notice", "unlicense"


def graph(root, programs):
    """What the programs are built from, by what is compiled into them, no tests, no build scripts: packages as cargo's metadata
    has them, by their ids, and the ids of what each needs."""
    host = next(line.split()[1] for line in subprocess.run(
        ["rustc", "-vV"], check=True, capture_output=True, text=True).stdout.splitlines() if line.startswith("host: "))
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    edges = {node["id"]: [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
             for node in metadata["resolve"]["nodes"]}
    todo = [key for key, package in packages.items() if package["name"] in programs and package["source"] is None]
    found = set(todo)
    while todo:
        for key in edges[todo.pop()]:
            if key not in found:
                found.add(key)
                todo.append(key)
    return {key: packages[key] for key in found}, {key: edges[key] for key in found}


def resolved(root, programs):
    """Packages of others among these."""
    packages, _ = graph(root, programs)
    others = [package for package in packages.values() if package["source"]]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def texts(package):
    """The licence texts and notices of a package."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [path for path in folder.iterdir() if path.is_file() and path.name.lower().startswith(NAMES)]
    if package.get("license_file"):
        files.append(folder / package["license_file"])
    found = {path.read_text(encoding="utf-8", errors="replace").strip() for path in files}
    return sorted(text for text in found if text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Needs cargo and what it has fetched for a build.")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write [stdout]")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="a program to write them for; repeat it [all three]")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    packages, wrong = resolved(root, args.program or PROGRAMS), []
    of_text, of_licence = collections.defaultdict(list), collections.defaultdict(list)
    lines = ["Keyway is built from its own sources (Apache-2.0) and from these packages:", ""]
    for package in packages:
        name, licence = f"{package['name']} {package['version']}", package["license"]
        if not licence and not package.get("license_file"):
            wrong.append(f"{name}: no licence")
        lines.append(f"{name}  {licence or 'its own'}  {package['repository'] or ''}".rstrip())
        own = texts(package)
        for text in own:
            of_text[text].append(name)
        of_licence[licence].append((name, bool(own)))
    # Some packages name a licence and have no text of it; that of another one by the same expression serves.
    for licence, members in of_licence.items():
        if not any(has for _, has in members):
            wrong += [f"{name}: no text of {licence}" for name, _ in members]
    if wrong:
        sys.exit("\n".join(wrong))
    for text, names in sorted(of_text.items(), key=lambda item: item[1]):
        lines += ["", "=" * 120, "Of " + ", ".join(names) + ":", "", text]
    text = "\n".join(lines) + "\n"
    if args.output:
        pathlib.Path(args.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:2])}: {error.stderr.strip() or error}")
    except BrokenPipeError:
        sys.exit(1)
