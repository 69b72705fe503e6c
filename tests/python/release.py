"""Looks into what `deploy/release.sh` has made, by other means than those that made it, and says what is wrong.

Usage: release.py FOLDER VERSION; prints each fault on a line, ends with 1 where there is one."""

import base64
import csv
import email.parser
import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import yaml

PROGRAMS = "keyway", "keyway-worker", "keyway-loadtest"
# Fields that CycloneDX 1.6 requires, or that a reader cannot do without.
BILL = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
NUMBER = r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Faults(list):
    def unless(self, fine, what):
        if not fine:
            self.append(what)


def one(folder, pattern):
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{len(found)} files are {pattern}, one is wanted")
    return found[0]


def sums(folder, faults):
    listed = dict(reversed(line.split("  ", 1)) for line in (folder / "SHA256SUMS").read_text().splitlines())
    there = {path.name: path for path in folder.iterdir() if path.name != "SHA256SUMS"}
    faults.unless(listed.keys() == there.keys(), f"SHA256SUMS: {sorted(listed.keys() ^ there.keys())}")
    for name in listed.keys() & there.keys():
        faults.unless(hashlib.sha256(there[name].read_bytes()).hexdigest() == listed[name], f"SHA256SUMS: {name} is another")


def glibc(program):
    """The newest version of glibc that a program asks for, by objdump."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(program)
        file.flush()
        text = subprocess.run(["objdump", "-p", file.name], check=True, capture_output=True, text=True).stdout
    return max(tuple(map(int, found)) for found in re.findall(r" GLIBC_(\d+)\.(\d+)", text))


def wheel(folder, version, faults):
    """Checks the wheel; its programs by name."""
    path = one(folder, "*.whl")
    name, of, *tag = path.stem.split("-")
    faults.unless((name, of) == ("keyway_gateway", version) and len(tag) == 3, f"{path.name}: not the name of a wheel")
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        data = {name: archive.read(name) for name in infos}
    info, scripts = f"{name}-{of}.dist-info", f"{name}-{of}.data/scripts"
    rows = list(csv.reader(io.StringIO(data[f"{info}/RECORD"].decode())))
    faults.unless([row[0] for row in rows] == list(infos), "RECORD: other files, or another order, than in the wheel")
    for file, digest, size in rows:
        if file == f"{info}/RECORD":
            faults.unless((digest, size) == ("", ""), "RECORD: has a digest of itself")
            continue
        want = base64.urlsafe_b64encode(hashlib.sha256(data[file]).digest()).decode().rstrip("=")
        faults.unless((digest, size) == (f"sha256={want}", str(len(data[file]))), f"RECORD: {file} is another")
    about = email.parser.Parser().parsestr(data[f"{info}/WHEEL"].decode())
    faults.unless(about["Wheel-Version"] == "1.0" and about["Tag"] == "-".join(tag), f"WHEEL: {dict(about)}")
    metadata = email.parser.Parser().parsestr(data[f"{info}/METADATA"].decode())
    faults.unless((metadata["Name"], metadata["Version"]) == ("keyway-gateway", version), f"METADATA: {dict(metadata)}")
    for file in metadata.get_all("License-File"):
        faults.unless(f"{info}/licenses/{file}" in data, f"METADATA: {file} is not in the wheel")
    programs = {program: data[f"{scripts}/{program}"] for program in PROGRAMS}
    for program in PROGRAMS:
        mode = infos[f"{scripts}/{program}"].external_attr >> 16
        faults.unless(mode == 0o100755, f"wheel: {program} has the mode {mode:o}")
    needed = max(map(glibc, programs.values()))
    faults.unless(tag[2].startswith(f"manylinux_{needed[0]}_{needed[1]}_"), f"wheel: glibc {needed} is needed, {tag[2]} promised")
    return programs


def deb(path, program, version, faults):
    """Checks a Debian package of a program, whose bytes these are."""
    name = path.name.split("_")[0]
    fields = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True, text=True).stdout
    fields = email.parser.Parser().parsestr(fields)
    needed = ".".join(map(str, glibc(program)))
    faults.unless((fields["Package"], fields["Version"]) == (name, version), f"{path.name}: {dict(fields)}")
    faults.unless(f"libc6 (>= {needed})" in fields["Depends"], f"{path.name}: needs glibc {needed}, asks for {fields['Depends']}")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = {member.name.removeprefix("./"): member for member in archive}
        data = {name: archive.extractfile(member).read() for name, member in members.items() if member.isfile()}
    faults.unless(data.get(f"usr/bin/{name}") == program, f"{path.name}: another program than the wheel's")
    for file, member in members.items():
        wanted = 0o755 if member.isdir() or file.startswith("usr/bin/") else 0o644
        faults.unless((member.uid, member.gid, member.mode) == (0, 0, wanted),
                      f"{path.name}: {file}: {member.uid}:{member.gid} {member.mode:o}")
    faults.unless(len({member.mtime for member in members.values()}) == 1, f"{path.name}: files of several times")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-e", path, folder], check=True)
        control = {file.name: file.read_text() for file in pathlib.Path(folder).iterdir()}
    kept = {line.strip("/") for line in control.get("conffiles", "").splitlines()}
    faults.unless(kept == {file for file in data if file.startswith("etc/")}, f"{path.name}: conffiles are {kept}")
    digests = dict(reversed(line.split("  ", 1)) for line in control["md5sums"].splitlines())
    want = {file: hashlib.md5(data[file]).hexdigest() for file in data.keys() - kept}
    faults.unless(digests == want, f"{path.name}: md5sums are of other files")
    units = {file.split("/")[-1]: data[file].decode() for file in data if file.startswith("usr/lib/systemd/system/")}
    for unit, text in units.items():
        for started in re.findall(r"^Exec\w+=(\S*keyway\S*)", text, re.MULTILINE):
            faults.unless(started.strip("/") in data, f"{unit}: starts {started}, which is not in the package")
        for told in re.findall(r"^Documentation=file:///(\S+)", text, re.MULTILINE):
            faults.unless(told in data, f"{unit}: names {told}, which is not in the package")
        for script in ("postinst", "prerm", "postrm"):
            faults.unless(unit in control.get(script, "") and "@" not in control[script], f"{path.name}: {script} forgets {unit}")
    return units


def tarball(folder, version, programs, faults):
    path = one(folder, "*-linux-gnu.tar.gz")
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        data = {member.name: archive.extractfile(member).read() for member in members}
    faults.unless(top.startswith(f"keyway-{version}-"), f"{path.name}: not of {version}")
    faults.unless({(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "root")}, f"{path.name}: owners")
    for program in PROGRAMS:
        member = next(member for member in members if member.name == f"{top}/bin/{program}")
        faults.unless(data[member.name] == programs[program] and member.mode == 0o755, f"{path.name}: {program} is another")
        for file in (f"completions/{program}.bash", f"completions/_{program}", f"completions/{program}.fish", f"man/{program}.1"):
            faults.unless(data.get(f"{top}/{file}"), f"{path.name}: no {file}")
    for file in ("LICENSE", "README.md", "keyway.toml", "THIRD-PARTY-NOTICES.txt", "keyway.cdx.json", "systemd/keyway.service"):
        faults.unless(data.get(f"{top}/{file}"), f"{path.name}: no {file}")


def chart(folder, version, faults):
    path = folder / f"keyway-{version}.tgz"
    with tarfile.open(path) as archive:
        data = {member.name: archive.extractfile(member).read() for member in archive}
    about = yaml.safe_load(data["keyway/Chart.yaml"])
    faults.unless((about["version"], about["appVersion"]) == (version, version), f"{path.name}: {about}")
    source = ROOT / "deploy/helm/keyway"
    there = {f"keyway/{file.relative_to(source).as_posix()}" for file in source.rglob("*") if file.is_file()}
    faults.unless(there == set(data), f"{path.name}: {sorted(there ^ set(data))}")


def bill(folder, version, faults):
    path = folder / f"keyway-{version}.cdx.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    faults.unless({key: found.get(key) for key in BILL} == BILL, f"{path.name}: {[found.get(key) for key in BILL]}")
    faults.unless(re.fullmatch(NUMBER, found.get("serialNumber", "")), f"{path.name}: the serial number is none")
    references = [each["bom-ref"] for each in found["components"]]
    faults.unless(len(references) == len(set(references)), f"{path.name}: a component is there twice")
    for each in found["components"]:
        name = each.get("name", "?")
        faults.unless(each.get("type") in ("application", "library") and each.get("version"), f"{path.name}: {name}: type, version")
        # Whatever comes from elsewhere can be found and checked.
        is_ours = name.startswith("keyway")
        licences = each.get("licenses") or [{}]
        expression = licences[0].get("expression") or licences[0].get("license", {}).get("name", "")
        faults.unless(expression and "/" not in expression, f"{path.name}: {name}: licence {expression!r}")
        digest = (each.get("hashes") or [{}])[0].get("content", "")
        fine = each.get("purl", "").startswith("pkg:cargo/") and re.fullmatch("[0-9a-f]{64}", digest)
        faults.unless(is_ours or fine, f"{path.name}: {name}: origin and checksum")
    for program in PROGRAMS:
        faults.unless(f"{program}@" in " ".join(references), f"{path.name}: {program} is not in it")
    known = {*references, found["metadata"]["component"]["bom-ref"]}
    edges = {each["ref"]: each["dependsOn"] for each in found["dependencies"]}
    faults.unless(set(edges) == known, f"{path.name}: dependencies of others than the components")
    faults.unless(known.issuperset(ref for refs in edges.values() for ref in refs), f"{path.name}: needs what is not listed")


def main():
    folder, version, faults = pathlib.Path(sys.argv[1]), sys.argv[2], Faults()
    sums(folder, faults)
    programs = wheel(folder, version, faults)
    units = {}
    for name in PROGRAMS:
        units.update(deb(one(folder, f"{name}_*.deb"), programs[name], version, faults))
    shipped = {path.name for path in (ROOT / "deploy/systemd").iterdir()}
    faults.unless(set(units) == shipped, f"units: {sorted(set(units) ^ shipped)}")
    tarball(folder, version, programs, faults)
    chart(folder, version, faults)
    bill(folder, version, faults)
    print("\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
