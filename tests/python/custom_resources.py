"""Writes tests/data/custom_resources.json: the fields of the custom resources that our manifests use, with which of them are
required, as their own projects' types have them. Read from the type declarations of the npm packages
@kubernetes-models/keda, prometheus-operator and gateway-api, which are generated from those types.

Usage: npm pack PACKAGE@VERSION, unpack, then custom_resources.py FOLDER_OF_PACKAGE... > tests/data/custom_resources.json"""

import json
import pathlib
import re
import sys

KINDS = {
    "keda.sh/v1alpha1": ["ScaledObject"],
    "monitoring.coreos.com/v1": ["ServiceMonitor", "PodMonitor", "PrometheusRule"],
    "gateway.networking.k8s.io/v1": ["HTTPRoute"],
}
FIELD = re.compile(r'^    "([\w-]+)"(\?)?: (.+?);?$', re.M)


def fields_of(folder, alias, seen):
    """The fields of a type by the long name under which other files import it: name -> [required, type]."""
    for path in sorted(folder.glob("*.d.ts")):
        text = path.read_text(encoding="utf-8")
        if not re.search(rf"\bas {re.escape(alias)}\b", text):
            continue
        # The class, unlike the interface, repeats what it inherits.
        declared = re.search(r"export declare class \w+ .*?\{\n(.*?)\n\}", text, re.S)
        if not declared:
            return None  # a plain value: a string with a pattern, an enumeration
        return {name: [not optional, shape(folder, kind, seen)]
                for name, optional, kind in FIELD.findall(declared.group(1))}
    return None  # Kubernetes' own types


def shape(folder, kind, seen):
    """`null` for a value, a list for a list of such, a dictionary for an object with fields."""
    listed = re.fullmatch(r"Array<(.+)>", kind)
    if listed:
        return [shape(folder, listed.group(1), seen)]
    alias = re.fullmatch(r"I((?:Com|Io)\w+)", kind)
    if not alias or alias.group(1) in seen:
        return None
    return fields_of(folder, "I" + alias.group(1), seen | {alias.group(1)})


def main():
    found = {}
    for package in map(pathlib.Path, sys.argv[1:]):
        about = json.loads((package / "package.json").read_text(encoding="utf-8"))
        for version, kinds in KINDS.items():
            folder = package / version
            for kind in kinds if folder.is_dir() else []:
                text = (folder / f"{kind}.d.ts").read_text(encoding="utf-8")
                spec = re.search(r'"spec"\??: (\w+);', text).group(1)
                found[f"{version} {kind}"] = {
                    "from": f"{about['name']} {about['version']}", "spec": shape(folder, spec, frozenset())}
    json.dump(found, sys.stdout, separators=(",", ":"), sort_keys=True)
    print()


main()
