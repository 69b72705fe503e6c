"""Reads a Compose file and says what does not fit together: a host that is no service, a file that is not there, a
port that nothing is told to listen on. Usage: compose.py FILE; prints JSON: `faults`, and `ours`, for each service of a
program of this project its name, the program and its arguments."""

import json
import os
import pathlib
import re
import sys

import yaml

PROGRAMS = {"keyway", "keyway-worker", "keyway-loadtest"}


def filled_in(text):
    """Variables as Compose fills them in: from the environment, else their defaults."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: os.environ.get(found[1]) or found[2], text)


def files(folder, service):
    """What of the host's files a service is given; a name without a slash is a volume."""
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        if "/" in source:
            yield source, (folder / source)


def named_hosts(texts):
    """Hosts of URLs."""
    for text in texts:
        yield from (found for found in re.findall(r"\w+://([\w.*-]+):\d+", text) if found not in ("*", "0.0.0.0", "127.0.0.1"))


def main():
    path = pathlib.Path(sys.argv[1])
    compose = yaml.safe_load(path.read_text(encoding="utf-8"))
    services, faults, ours = compose["services"], [], []
    for name, service in services.items():
        command = [filled_in(word) for word in service.get("command", [])]
        program = service["image"].split(":")[0].split("/")[-1]
        if program in PROGRAMS:
            ours.append([name, program, command])
        texts = list(command)
        for source, host in files(path.parent, service):
            if host.is_file():
                texts.append(host.read_text(encoding="utf-8"))
                if host.name == "prometheus.yml":
                    texts += [f"http://{target}" for job in yaml.safe_load(texts[-1])["scrape_configs"]
                              for each in job["static_configs"] for target in each["targets"]]
            elif not host.is_dir():
                faults.append(f"{name}: {source} is not there")
        faults += [f"{name}: {host} is no service" for host in named_hosts(texts) if host not in services]
        faults += [f"{name}: depends on {other}" for other in service.get("depends_on", []) if other not in services]
        for port in service.get("ports", []):
            inside = port.split(":")[-1]
            if program in PROGRAMS | {"prometheus"} and not any(f":{inside}" in word for word in command):
                faults.append(f"{name}: nothing is told to listen on {inside}")
    print(json.dumps({"faults": faults, "ours": ours}))


if __name__ == "__main__":
    main()
