"""Holds a bill of materials against CycloneDX's own schema. Usage: bill.py FILE, with cyclonedx-python-lib."""

import json
import pathlib
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
validator = JsonStrictValidator(SchemaVersion.V1_6)
fault = validator.validate_str(text)
if fault:
    sys.exit(f"{sys.argv[1]}: {fault}")
# The check sees what is wrong.
bill = json.loads(text)
bill["components"][0]["type"] = "crate"
if not validator.validate_str(json.dumps(bill)):
    sys.exit("the schema takes anything")
print(f"CycloneDX 1.6: {len(bill['components'])} components")
