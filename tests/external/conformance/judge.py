"""Judges the suites' results by the list of exceptions, and prints a table.

Usage: judge.py EXCEPTIONS JUNIT.xml... An exception is a line `PATTERN  REASON`: a regular expression over a test's
`class::name`, two blanks, and why it fails. Exits non-zero if a test fails without one, or if one never fails.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def main(exceptions_path: str, *reports: str) -> int:
    lines = [line for line in Path(exceptions_path).read_text().splitlines() if line and not line.startswith("#")]
    exceptions = [(re.compile(pattern), reason) for pattern, reason in (line.split("  ", 1) for line in lines)]
    used, faults = set(), []
    print(f"| {'suite':13} | passed | excepted | skipped | failed |\n|---|---|---|---|---|")
    for report in reports:
        counts = dict.fromkeys(("passed", "excepted", "skipped", "failed"), 0)
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            reason = next((i for i, (pattern, _) in enumerate(exceptions) if pattern.search(name)), None)
            if case.find("skipped") is not None:
                counts["skipped"] += 1
            elif case.find("failure") is None and case.find("error") is None:
                counts["passed"] += 1
            elif reason is None:
                counts["failed"] += 1
                faults.append(f"{name} fails")
            else:
                counts["excepted"] += 1
                used.add(reason)
        if not any(counts.values()):
            faults.append(f"{report} holds no test")
        print(f"| {Path(report).stem:13} | {' | '.join(str(n) for n in counts.values())} |")
    faults += [f"'{p.pattern}' never fails" for i, (p, _) in enumerate(exceptions) if i not in used]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
