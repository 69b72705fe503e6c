#!/usr/bin/env python3
"""Writes what the programs are built from as a bill of materials: CycloneDX 1.6, JSON.

Packages, licences and who needs whom are cargo's, checksums those of Cargo.lock. Nothing is downloaded."""

import json
import pathlib
import re
import subprocess
import sys
import time
import tomllib
import uuid

import shared

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import notices  # noqa: E402


def reference(package):
    """The name of a package within the bill."""
    return f"{package['name']}@{package['version']}"


def licences(package):
    """A package's licence, as an SPDX expression; cargo's older form has a slash for `OR`."""
    if package["license"]:
        return [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    return [{"license": {"name": f"the text in {package['license_file']}"}}] if package["license_file"] else []


def component(package, checksums):
    """One package."""
    is_program = package["name"] in shared.PROGRAMS and package["source"] is None
    found = {
        "type": "application" if is_program else "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "licenses": licences(package),
    }
    if package["description"]:
        found["description"] = " ".join(package["description"].split())
    if package["source"]:
        found["purl"] = f"pkg:cargo/{package['name']}@{package['version'].replace('+', '%2B')}"
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"].strip()}]
    return found


def bill(version, epoch):
    """The whole document, without its serial number."""
    packages, edges = notices.graph(shared.ROOT, tuple(shared.PROGRAMS))
    lock = tomllib.loads((shared.ROOT / "Cargo.lock").read_text(encoding="utf-8"))
    checksums = {(each["name"], each["version"]): each.get("checksum") for each in lock["package"]}
    components = [component(package, checksums) for package in packages.values()]
    whole = f"keyway-programs@{version.plain}"
    programs = [each["bom-ref"] for each in components if each["type"] == "application"]
    needs = {reference(packages[key]): sorted({reference(packages[other]) for other in others}) for key, others in edges.items()}
    needs[whole] = sorted(programs)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "tools": {"components": [{"type": "application", "name": "keyway-release", "version": version.plain}]},
            "component": {"type": "application", "bom-ref": whole, "name": "keyway-programs", "version": version.plain,
                          "licenses": [{"expression": "Apache-2.0"}]},
        },
        "components": sorted(components, key=lambda each: each["bom-ref"]),
        "dependencies": [{"ref": ref, "dependsOn": needs[ref]} for ref in sorted(needs)],
    }


def main():
    parser = shared.arguments(__doc__.split("\n")[0], stage=False)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, metavar="FILE")
    args = parser.parse_args()
    found = bill(args.version, args.epoch)
    # Equal bills have equal numbers, and others have others.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(found, sort_keys=True))
    args.output.write_text(json.dumps({"serialNumber": f"urn:uuid:{number}", **found}, indent=1, sort_keys=True) + "\n",
                           encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:2])}: {error.stderr.strip() or error}")
    except OSError as error:
        sys.exit(str(error))
